"""Finds the local engine directory of any location. All commands and programs that run a model use this function."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.draft_settings import check_draft_settings
from stoker.deploy.build_settings import BuildSettings, apply_build_settings
from stoker.deploy.prepare import Progress, check_build, prepare_engine, read_deployment
from stoker.deploy.runtime_checks import check_device, check_runtime, with_runtime_limits


def find_engine(
    location: str | Path,
    *,
    runtime: RuntimeConfig | None,
    build: BuildSettings = BuildSettings(),
    progress: Progress | None = None,
) -> Path:
    """The engine directory of `location`, which is fetched and built if necessary. Built engines are cached.

    Args:
        location: An engine, a checkpoint folder, a .gguf file, a Triton, LMI or Truss folder, a tar archive, a hub id, or an address.
        runtime: How the engine will be run on this machine. Its device and batch sizes also determine an engine that is built. None: the
            engine is not run, and may be one for a device that this machine lacks.
        build: Settings of an engine that is built. They are refused for a location that is an engine.
        progress: Receives (stage, done, total or None) from several threads.

    Raises:
        ConfigError for a location or setting that is not supported, before anything is fetched or built if possible; CheckpointError for a
        checkpoint that is absent or damaged; EngineError for an engine that is.
    """
    environment = env.child_environment()
    if runtime is not None:
        check_draft_settings(runtime)
    check_device(runtime.device if runtime is not None else None, environment)
    check_build(build)
    deployment = apply_build_settings(read_deployment(location, environment, progress), build)
    if runtime is not None:
        deployment.nodes.check_one_host()
        deployment = with_runtime_limits(deployment, runtime)
        given = {name: value for name in ("device", "max_batch_size", "max_num_tokens") if (value := getattr(runtime, name)) is not None}
        deployment = msgspec.structs.replace(deployment, runtime=msgspec.structs.replace(deployment.runtime, **given))
        check_runtime(deployment, environment)
    return prepare_engine(deployment, environment, progress).engine
