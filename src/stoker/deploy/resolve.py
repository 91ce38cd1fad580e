"""From a deployment to an engine that is there: fetch what it names, build through the cache what has to be built."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy import lmi, secrets, sources
from stoker.deploy.deployment import FORMATS, BuildOptions, Deployment, EngineSource, recognise
from stoker.deploy.engine import read_config
from stoker.deploy.sources.hub import ClosedError

if TYPE_CHECKING:
    from stoker.builder.config import BuildConfig

# (what is being done, how much is done, of how much or None): bytes of downloads and weights, else steps.
Progress = Callable[[str, int, int | None], None]

_READ_AS_THEY_ARE = (".gguf", ".properties", ".yaml")
_VERSION_KEYS = ("baichuan_model_version", "chatglm_model_version", "gpt_model_version")
_ROTARY_KEYS = ("rotary_base", "rotary_dim", "rotary_scaling_type", "rotary_scaling_factor")


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """An engine directory of this machine, and the deployment as it was completed on the way."""

    engine: Path
    deployment: Deployment
    tokenizer: Path | None = None  # None: the engine's own


def read(location: str | Path | None, environment: Environment[str, str], progress: Progress | None = None) -> Deployment:
    """What `location` asks for: a folder of any format, a .gguf file, a tar archive, or an address that is fetched first.

    None: what SageMaker starts a container with: /opt/ml/model and the environment. Raises ConfigError for what is no format or
    cannot be honoured, CheckpointError for what cannot be fetched.
    """
    if location is None:
        return _container(environment)
    path = Path(location).expanduser()
    if not path.is_dir() and path.suffix not in _READ_AS_THEY_ARE:
        if not path.exists() and "/" not in str(location):  # a hub's models have owners; this is a typing error
            raise ConfigError(f"{location} does not exist.", cure="Name a directory, a .gguf file, ORG/NAME or s3://BUCKET/PREFIX.")
        path = sources.resolve(str(location), token=secrets.find("HF_TOKEN", environment), progress=progress)
    if not path.exists():
        raise ConfigError(f"{path} does not exist.", cure="Correct the path.")
    return recognise(path).load(path, environment)


def _container(environment: Environment[str, str]) -> Deployment:
    if not lmi.CONTAINER.is_dir() and not (environment.get("HF_MODEL_ID") or environment.get("OPTION_MODEL_ID")):
        raise ConfigError(f"there is no {lmi.CONTAINER}, and no HF_MODEL_ID.", cure="Name what to serve: stoker serve DIR.")
    return lmi.load(lmi.CONTAINER, environment)


def ready(deployment: Deployment, environment: Environment[str, str], progress: Progress | None = None) -> Ready:
    """Fetch, complete and, for a checkpoint, build; a second call, in any process, finds the engine in the cache.

    Raises CheckpointError, ConfigError or EngineError; no message holds a secret's value.
    """
    source = deployment.source
    location = source.location if isinstance(source, EngineSource) else source.checkpoint
    if isinstance(source, EngineSource) and Path(location).is_absolute() and not Path(location).exists():
        raise ConfigError(f"{deployment.path} names the engine {location}, which is no directory here.", cure="Correct the path.")
    local = fetch(location, source, environment, progress)
    complete = FORMATS.get(deployment.format).complete
    if complete is not None:
        deployment = complete(deployment, local)
    engine = _engine(deployment, local, environment, progress)
    return Ready(engine=engine, deployment=deployment, tokenizer=_tokenizer(deployment, engine, environment, progress))


def _engine(deployment: Deployment, local: Path, environment: Environment[str, str], progress: Progress | None) -> Path:
    """The engine: what was named, what a completed format found inside it, or what is built of it."""
    source = deployment.source
    if isinstance(source, BuildOptions) and "format_version" not in read_config(local):
        return _build(deployment, local, environment, progress)
    named = Path(source.location) if isinstance(source, EngineSource) else local
    engine = named if named.is_dir() else local
    _check_engine(deployment, engine)
    return engine


def fetch(location: str, source: EngineSource | BuildOptions, environment: Environment[str, str], progress: Progress | None) -> Path:
    """The local path of one of a source's locations. The secret that it names is read here, and given to the download alone."""
    token = secrets.find(source.token_secret, environment) if source.token_secret else None
    if Path(location).expanduser().exists():
        return Path(location).expanduser()
    try:
        return sources.resolve(location, revision=source.revision, digest=source.digest, token=token, progress=progress)
    except ClosedError as error:
        if token is not None or not source.token_secret:
            raise
        told = f"{error.message.rstrip('.')}, and the secret {source.token_secret} is not set."
        raise CheckpointError(
            told, cure=f"Correct the name, or put a token that may read it into {secrets.places(source.token_secret)}."
        ) from None


def build_config(deployment: Deployment, tokenizer: Path | None = None) -> BuildConfig:
    """What the builder is asked for. Raises ConfigError for a setting that it does not have."""
    from stoker.builder.config import BuildConfig

    options = deployment.source
    assert isinstance(options, BuildOptions)
    extra = dict(options.extra)
    versions = {name: extra.pop(name) for name in _VERSION_KEYS if name in extra}
    rotary = {name: extra.pop(name) for name in _ROTARY_KEYS if name in extra}
    if extra:
        raise ConfigError(f"{deployment.path}: the builder has no setting {sorted(extra)[0]}.", cure="Remove it.")
    unset = tuple(s.name for s in deployment.settings if s.section == "build" and s.origin.source.startswith("default"))
    return BuildConfig(
        dtype=options.dtype,
        quantization=options.quantization,
        **BuildConfig.fields_from_settings(options.quantization_settings),
        kv_cache_dtype=options.kv_cache_dtype,
        limits=options.limits,
        shrinking=unset,
        mapping=options.mapping,
        device=deployment.runtime.device,
        trust_remote_code=options.trust_remote_code,
        tokenizer=str(tokenizer) if tokenizer else None,
        versions=versions,
        **rotary,
    )


def _build(deployment: Deployment, local: Path, environment: Environment[str, str], progress: Progress | None) -> Path:
    from stoker.builder.build import build_cached
    from stoker.runtime.aot import compile_kernels

    options = deployment.source
    assert isinstance(options, BuildOptions)
    own = fetch(options.tokenizer, options, environment, progress) if options.tokenizer else None
    config = build_config(deployment, own)
    changed = config.rotary_base is not None or config.rotary_scaling_type is not None
    # Greedy tokens are not the checkpoint's once its positions turn otherwise.
    return build_cached(local, config, verify="files" if changed else "auto", progress=progress, kernels=compile_kernels).path


def _check_engine(deployment: Deployment, engine: Path) -> None:
    """The ranks that a format names are the engine's."""
    from stoker.engine.reader import Engine

    asked, built = getattr(deployment.source, "mapping", None), Engine.open(engine).config.mapping
    if isinstance(deployment.source, EngineSource) and asked is not None and asked.world_size != built.world_size:
        raise ConfigError(
            f"{deployment.path} asks for {_ranks(asked)}, and the engine {engine} was built for {_ranks(built)}.",
            cure="Make the two equal, or build the engine again.",
        )


def _ranks(mapping: object) -> str:
    return f"tensor {mapping.tensor_parallel} × pipeline {mapping.pipeline_parallel}"  # type: ignore[attr-defined]


def _tokenizer(
    deployment: Deployment, engine: Path, environment: Environment[str, str], progress: Progress | None
) -> Path | None:  # fmt: skip
    """A directory with a tokenizer.json; None where the engine's own is meant. A build takes another one up into its engine."""
    if deployment.tokenizer is None or isinstance(deployment.source, BuildOptions) or Path(deployment.tokenizer) == engine:
        return None
    folder = fetch(deployment.tokenizer, deployment.source, environment, progress)
    return folder if (folder / "tokenizer.json").is_file() else None
