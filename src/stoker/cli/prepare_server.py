"""Prepares a server: from a path or address on the command line to an engine and the settings with which it is served.

`read_deployment` reads what the path requests and applies the command line's options; it fetches and builds nothing but the folder itself.
`prepare_server` fetches or builds the engine.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings, describe_placement, place_ranks
from stoker.cli.node_options import check_required_nodes
from stoker.deploy import prepare
from stoker.deploy.build_settings import BuildSettings, apply_build_settings
from stoker.deploy.deployment import BuildOptions, Deployment, EngineInfo, EngineSource
from stoker.deploy.draft_engine import names_missing_engine
from stoker.deploy.model_name import model_name_of
from stoker.deploy.runtime_checks import check_device, check_runtime, override_runtime, with_runtime_limits
from stoker.deploy.triton.export import five_models
from stoker.engine.config_file import read_summary
from stoker.server.names import check_names
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.settings import ServerSettings

log = get_logger(__name__)
S = TypeVar("S", ServerSettings, RuntimeConfig)


class PreparedServer(msgspec.Struct, kw_only=True):
    """The arguments of `server.processes.supervisor.serve`."""

    engine: Path
    settings: ServerSettings
    runtime: RuntimeConfig
    deployment: Deployment
    tokenizer: Path | None = None  # None: the engine's own


def read_deployment(
    path: str | Path | None,
    settings: ServerSettings,
    runtime: RuntimeConfig,
    explicit: frozenset[str] | None = None,
    progress: prepare.Progress | None = None,
    build: BuildSettings = BuildSettings(),
) -> Deployment:
    """The deployment that a path or address requests, with the command line's settings applied. Its engine is not fetched or built.

    `explicit` names the fields that were set on the command line; they override the folder's settings. None: the fields that differ from
    their default. Raises ConfigError, before anything is read if possible, and CheckpointError for an address that cannot be fetched.
    """
    environment = env.child_environment()
    check_names(settings)
    check_device(runtime.device, environment)
    prepare.check_build(build)
    deployment = apply_build_settings(prepare.read_deployment(path, environment, progress), build)
    requested = override_fields(RuntimeConfig(), runtime, explicit)
    deployment = _override(with_runtime_limits(deployment, requested), settings, runtime, explicit)
    check_runtime(deployment, environment)
    return _with_name(deployment, path)


def prepare_server(
    deployment: Deployment,
    progress: prepare.Progress | None = None,
    nodes: NodeSettings = NodeSettings(),
    *,
    executor_checks: bool = False,
) -> PreparedServer:
    """Fetch or build the deployment's engine, and log the deployment's notes. Raises ConfigError, CheckpointError and EngineError.

    With `executor_checks`, only the executor checks that the engine runs on this machine, and torch is not imported for an engine that
    exists.
    """
    for note in deployment.notes:
        log.log(logging.WARNING if note.severity == "warning" else logging.INFO, "%s", note)
    prepared = prepare.prepare_engine(deployment, env.child_environment(), progress)
    if nodes.num_nodes == 1:
        check_required_nodes(deployment.nodes, nodes, num_ranks=engine_info(prepared.engine).mapping.world_size)
    _check_beams(prepared.engine, prepared.deployment)
    if not executor_checks:
        _check_start(prepared.engine, prepared.deployment, nodes)
    return PreparedServer(
        engine=prepared.engine,
        settings=_with_models(prepared.deployment.server, prepared.engine),
        runtime=prepared.deployment.runtime,
        deployment=prepared.deployment,
        tokenizer=prepared.tokenizer,
    )


def local_engine(deployment: Deployment) -> Path | None:
    """The engine's directory, or None if it must be fetched or built, which may take long. None for cached builds, too."""
    source = deployment.source
    path = Path(source.location).expanduser() if isinstance(source, EngineSource) else None
    return path if path is not None and path.is_dir() else None


def check_engine(deployment: Deployment, nodes: NodeSettings = NodeSettings()) -> None:
    """Raise the errors of a start that would not accept the deployment's local engine. Without one, only paths are checked.

    A start rejects a missing or incomplete engine, one of another format version or for other devices or ranks, and settings above its
    limits.
    """
    prepare.check_locations(deployment)
    path = local_engine(deployment)
    if path is not None:
        prepare.check_ranks(deployment, path)
        if nodes.num_nodes == 1:
            check_required_nodes(deployment.nodes, nodes, num_ranks=engine_info(path).mapping.world_size)
        _check_beams(path, deployment)
        _check_start(path, deployment, nodes)


def engine_info(path: Path) -> EngineInfo:
    """The data in an engine's config.json that an export to a deployment folder needs. Raises EngineError."""
    found = read_summary(path)
    return EngineInfo(
        path=str(path.resolve()), architecture=found.model.architecture, vocab_size=found.model.vocab_size, dtype=found.dtype,
        device=found.target.device, limits=found.limits, mapping=found.mapping,
    )  # fmt: skip


def override_fields(base: S, settings: S, explicit: frozenset[str] | None = None) -> S:
    """A copy of `base` with the fields in `explicit` from `settings`; None stands for the fields that differ from their default."""
    return msgspec.structs.replace(base, **_changed_fields(settings, explicit))


def _changed_fields(settings: ServerSettings | RuntimeConfig, explicit: frozenset[str] | None) -> dict[str, Any]:
    """The values of the fields in `explicit`; None stands for the fields that differ from their default."""
    default = type(settings)()
    names = [name for name in settings.__struct_fields__ if explicit is None or name in explicit]
    return {name: value for name in names if (value := getattr(settings, name)) != getattr(default, name) or explicit is not None}


def describe_nodes(deployment: Deployment, nodes: NodeSettings) -> list[str]:
    """The lines that show which ranks run on which node. Raises ConfigError if the ranks cannot be divided among the nodes."""
    path, source = local_engine(deployment), deployment.source
    if path is not None:
        mapping = engine_info(path).mapping
    elif isinstance(source, BuildOptions):
        mapping = source.mapping
    else:
        return []
    return describe_placement(mapping, place_ranks(mapping, nodes.num_nodes))


def _check_start(path: Path, deployment: Deployment, nodes: NodeSettings) -> None:
    """Raise ConfigError or EngineError if the engine does not run on this machine with the deployment's settings."""
    from stoker.engine.reader import Engine
    from stoker.runtime.start_checks import check_start

    runtime = deployment.runtime
    if names_missing_engine(deployment):
        runtime = msgspec.structs.replace(runtime, speculate="none")
    check_start(Engine.open(path), runtime, nodes)


def _check_beams(path: Path, deployment: Deployment) -> None:
    """Raise ConfigError if the deployment has wider beams than the engine."""
    options = deployment.server.options
    beams, limit = options.max_beam_width if isinstance(options, TritonOptions) else 1, engine_info(path).limits.max_beam_width
    if beams > limit:
        raise ConfigError(
            f"{deployment.path}: max_beam_width={beams} is above {limit}, the limit of the engine {path}.",
            cure=f"Lower it, or build the engine with --max-beam-width {beams}.",
        )


def _override(deployment: Deployment, settings: ServerSettings, runtime: RuntimeConfig, explicit: frozenset[str] | None) -> Deployment:
    """The deployment with the command line's settings."""
    return msgspec.structs.replace(
        deployment,
        server=override_fields(deployment.server, settings, explicit),
        runtime=override_runtime(deployment.runtime, _changed_fields(runtime, explicit)),
    )


def _with_name(deployment: Deployment, path: str | Path | None) -> Deployment:
    """`deployment` with a model name from the path or address on the command line, instead of from its folder in the cache.

    The models of a Triton repository have their names in the repository's files; the server is named after the engine.
    """
    server, source = deployment.server, deployment.source
    if path is None or server.model_name not in (None, Path(deployment.path).name):
        return deployment
    named_by = source.location if deployment.format == "triton" and isinstance(source, EngineSource) else path
    return msgspec.structs.replace(deployment, server=msgspec.structs.replace(server, model_name=model_name_of(named_by)))


def _with_models(settings: ServerSettings, engine: Path) -> ServerSettings:
    """`settings` with the five Triton models of an engine, if the deployment format has no Triton options of its own."""
    if settings.options is not None:
        return settings
    info = engine_info(engine)
    options = TritonOptions(models=five_models(info, {"decoupled_mode": "true"}), unary=True, max_beam_width=info.limits.max_beam_width)
    return msgspec.structs.replace(settings, options=options)
