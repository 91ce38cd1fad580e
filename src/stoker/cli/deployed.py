"""What a path asks to be served: an engine as it is, or a folder that names one and says how."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.base import env
from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.deploy.deployment import Deployment, EngineInfo, EngineSource, recognise
from stoker.deploy.triton.export import five_models
from stoker.engine.reader import Engine, is_engine
from stoker.server.schemas.settings import ServerSettings
from stoker.server.schemas.triton_models import TritonOptions

log = get_logger(__name__)
S = TypeVar("S", ServerSettings, RuntimeConfig)


class Deployed(msgspec.Struct, kw_only=True):
    """Ready for server.process.serve."""

    engine: Path
    settings: ServerSettings
    runtime: RuntimeConfig
    tokenizer: Path | None = None
    devices: tuple[int, ...] | None = None
    deployment: Deployment | None = None  # None: the path is an engine


def deployed(path: Path, settings: ServerSettings, runtime: RuntimeConfig) -> Deployed:
    """What is asked on the command line wins over the folder's own settings. Raises ConfigError and EngineError."""
    if is_engine(path) or not path.is_dir():
        info = engine_info(path)
        options = TritonOptions(models=five_models(info, {"decoupled_mode": "true"}), unary=True, max_beam_width=info.limits.max_beam_width)
        return Deployed(engine=path, settings=msgspec.structs.replace(settings, options=options), runtime=runtime)
    deployment = recognise(path).load(path, env.child_environment())
    for note in deployment.notes:
        log.log(30 if note.severity == "warning" else 20, "%s", note)
    engine = _engine(deployment)
    engine_info(engine)
    return Deployed(
        engine=engine,
        settings=over(deployment.server, settings),
        runtime=over(deployment.runtime, runtime),
        tokenizer=_tokenizer(deployment, engine),
        devices=deployment.devices,
        deployment=deployment,
    )


def engine_info(path: Path) -> EngineInfo:
    config = Engine.open(path).config
    return EngineInfo(
        path=str(path.resolve()), architecture=config.model.architecture, vocab_size=config.model.vocab_size, dtype=config.dtype,
        limits=config.limits, mapping=config.mapping,
    )  # fmt: skip


def over(base: S, asked: S) -> S:
    """`base` with every field of `asked` that is not its default."""
    default = type(asked)()
    changed = {name: value for name in asked.__struct_fields__ if (value := getattr(asked, name)) != getattr(default, name)}
    return msgspec.structs.replace(base, **changed)


def _engine(deployment: Deployment) -> Path:
    if not isinstance(deployment.source, EngineSource):
        raise ConfigError(
            f"{deployment.path} names a checkpoint, {deployment.source.checkpoint}.",
            cure="Build an engine of it with stoker build, and name that.",
        )
    path = Path(deployment.source.location)
    if not path.is_dir():
        raise ConfigError(f"{deployment.path} names the engine {path}, which is no directory here.", cure="Correct the path.")
    return path


def _tokenizer(deployment: Deployment, engine: Path) -> Path | None:
    """A directory with a tokenizer.json; the engine carries its own for everything else."""
    if deployment.tokenizer is None or Path(deployment.tokenizer) == engine:
        return None
    if (Path(deployment.tokenizer) / "tokenizer.json").is_file():
        return Path(deployment.tokenizer)
    log.warning("%s: tokenizer_dir %s has no tokenizer.json here; the engine's own is used.", deployment.path, deployment.tokenizer)
    return None
