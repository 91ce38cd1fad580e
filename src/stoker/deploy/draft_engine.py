"""Builds the draft engine of a deployment that names a checkpoint of a draft model. Built engines are cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.base.draft_settings import uses_drafter
from stoker.deploy.deployment import Deployment
from stoker.deploy.engine import read_config
from stoker.deploy.model_name import checkpoint_name_of


def must_be_built(path: Path) -> bool:
    """Whether a path is the checkpoint of a model, from which a draft engine is built; not an engine, and not draft heads."""
    from stoker.runtime.worker.draft_sources import is_drafter

    return path.suffix == ".gguf" or ("architectures" in read_config(path) and not is_drafter(path))


def names_missing_engine(deployment: Deployment) -> bool:
    """Whether the draft engine of a deployment is not built yet, or must be fetched."""
    path = Path(deployment.runtime.speculate).expanduser()
    return uses_drafter(deployment.runtime) and (not path.exists() or must_be_built(path))


def with_built_draft_engine(deployment: Deployment, engine: Path, progress: Callable[[str, int, int | None], None] | None) -> Deployment:
    """A copy in which `speculate` names a draft engine where it named a checkpoint. It is built for the device of `engine`.

    Raises CheckpointError or ConfigError.
    """
    runtime = deployment.runtime
    path = Path(runtime.speculate).expanduser()
    if not uses_drafter(runtime) or not must_be_built(path):
        return deployment
    from stoker.builder.build import build_cached
    from stoker.builder.config import BuildConfig
    from stoker.engine.reader import Engine
    from stoker.runtime.aot import compile_kernels

    config = BuildConfig(device=Engine.open(engine).config.target.device)
    built = build_cached(path, config, name=checkpoint_name_of(path), progress=progress, kernels=compile_kernels).path
    return msgspec.structs.replace(deployment, runtime=msgspec.structs.replace(runtime, speculate=str(built)))
