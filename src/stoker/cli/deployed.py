"""What a path asks to be served: an engine as it is, or a folder that names one and says how."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.logging import get_logger
from stoker.deploy import model_name, resolve
from stoker.deploy.deployment import Deployment, EngineInfo, EngineSource
from stoker.deploy.triton.export import five_models
from stoker.engine.reader import Engine
from stoker.server.schemas.settings import ServerSettings
from stoker.server.schemas.triton_models import TritonOptions

log = get_logger(__name__)
S = TypeVar("S", ServerSettings, RuntimeConfig)


class Deployed(msgspec.Struct, kw_only=True):
    """Ready for server.process.serve."""

    engine: Path
    settings: ServerSettings
    runtime: RuntimeConfig
    deployment: Deployment
    tokenizer: Path | None = None


def deployed(
    path: str | Path | None,
    settings: ServerSettings,
    runtime: RuntimeConfig,
    given: frozenset[str] | None = None,
    progress: resolve.Progress | None = None,
) -> Deployed:
    """The engine of a path or address, fetched or built where it must be: `asked` and `made` in one."""
    return made(asked(path, settings, runtime, given, progress), progress)


def asked(
    path: str | Path | None,
    settings: ServerSettings,
    runtime: RuntimeConfig,
    given: frozenset[str] | None = None,
    progress: resolve.Progress | None = None,
) -> Deployment:
    """What a path or address asks for; no engine is fetched or built for it.

    Fields in `given` were set on the command line and win over the folder's own settings; without it, those that are not at their
    default. Raises ConfigError, and CheckpointError for an address that cannot be fetched.
    """
    return _named(overridden(resolve.read(path, env.child_environment(), progress), settings, runtime, given), path)


def made(deployment: Deployment, progress: resolve.Progress | None = None) -> Deployed:
    """Its engine. Raises ConfigError, CheckpointError and EngineError."""
    for note in deployment.notes:
        log.log(30 if note.severity == "warning" else 20, "%s", note)
    found = resolve.ready(deployment, env.child_environment(), progress)
    return Deployed(
        engine=found.engine,
        settings=_with_models(deployment.server, found.engine),
        runtime=deployment.runtime,
        deployment=found.deployment,
        tokenizer=found.tokenizer,
    )


def waits(deployment: Deployment) -> bool:
    """Whether an engine must be fetched or built first; what is in the cache already is there at once."""
    return _engine(deployment) is None


def check_engine(deployment: Deployment) -> None:
    """Raise EngineError where an engine that is there is not whole, or of another format version: no start would take it."""
    path = _engine(deployment)
    if path is not None:
        Engine.open(path)


def _engine(deployment: Deployment) -> Path | None:
    """The engine's directory, where nothing must be fetched or built for it."""
    source = deployment.source
    path = Path(source.location).expanduser() if isinstance(source, EngineSource) else None
    return path if path is not None and path.is_dir() else None


def overridden(
    deployment: Deployment, settings: ServerSettings, runtime: RuntimeConfig, given: frozenset[str] | None = None
) -> Deployment:  # fmt: skip
    """`deployment` with what the command line says."""
    server, run = over(deployment.server, settings, given), over(deployment.runtime, runtime, given)
    return msgspec.structs.replace(deployment, server=server, runtime=run)


def _named(deployment: Deployment, path: str | Path | None) -> Deployment:
    """`deployment` under the name of what a person asked for, not of the folder in the cache that it was unpacked to or built in.

    Triton's models are named in their files.
    """
    server = deployment.server
    if path is None or deployment.format == "triton" or server.model_name not in (None, Path(deployment.path).name):
        return deployment
    return msgspec.structs.replace(deployment, server=msgspec.structs.replace(server, model_name=model_name.of(path)))


def _with_models(settings: ServerSettings, engine: Path) -> ServerSettings:
    """Triton's five models where the format has no options of its own."""
    info = engine_info(engine)
    if settings.options is not None:
        return settings
    options = TritonOptions(models=five_models(info, {"decoupled_mode": "true"}), unary=True, max_beam_width=info.limits.max_beam_width)
    return msgspec.structs.replace(settings, options=options)


def engine_info(path: Path) -> EngineInfo:
    config = Engine.open(path).config
    return EngineInfo(
        path=str(path.resolve()), architecture=config.model.architecture, vocab_size=config.model.vocab_size, dtype=config.dtype,
        limits=config.limits, mapping=config.mapping,
    )  # fmt: skip


def over(base: S, asked: S, given: frozenset[str] | None = None) -> S:
    """`base` with the fields of `asked` that are `given`; without that, with those that are not at their default."""
    default = type(asked)()
    names = [name for name in asked.__struct_fields__ if given is None or name in given]
    changed = {name: value for name in names if (value := getattr(asked, name)) != getattr(default, name) or given is not None}
    return msgspec.structs.replace(base, **changed)
