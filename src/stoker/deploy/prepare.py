"""Reads the deployment of a location, and prepares its engine, which is fetched or built through the engine cache."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.base.draft_settings import uses_drafter
from stoker.base.errors import CheckpointError, ConfigError
from stoker.deploy import sources
from stoker.deploy.build_settings import BuildSettings
from stoker.deploy.cached_engines import find_cached_engine
from stoker.deploy.deployment import FORMATS, BuildOptions, Deployment, EngineSource, configuration_files, find_format
from stoker.deploy.draft_engine import with_built_draft_engine
from stoker.deploy.engine import read_config
from stoker.deploy.lmi.load import CONTAINER, load_lmi
from stoker.deploy.model_name import checkpoint_name_of
from stoker.deploy.secrets import find_secret, secret_places
from stoker.deploy.sources.hub import AccessError
from stoker.engine.config_file import read_summary

if TYPE_CHECKING:
    from stoker.builder.config import BuildConfig

# (action, amount done, total amount or None). Amounts are bytes of downloads and weights, and otherwise steps.
Progress = Callable[[str, int, int | None], None]

_VERSION_KEYS = ("baichuan_model_version", "chatglm_model_version", "gpt_model_version")
_ROTARY_KEYS = ("rotary_base", "rotary_dim", "rotary_scaling_type", "rotary_scaling_factor")


class PreparedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A local engine directory and the completed deployment."""

    engine: Path
    deployment: Deployment
    tokenizer: Path | None = None  # None: that of the engine


def read_deployment(location: str | Path | None, environment: Environment[str, str], progress: Progress | None = None) -> Deployment:
    """The deployment for `location`: a folder of any format, a .gguf file, a tar archive, or an address, which is fetched.

    None stands for a SageMaker container: /opt/ml/model and the environment. Raises ConfigError for an unknown format and for settings that
    are not supported, CheckpointError for a location that cannot be fetched.
    """
    if location is None:
        return _read_container(environment)
    path = local_path(location, environment, progress)
    deployment = find_format(path).load(path, environment)
    if deployment.format == "checkpoint" and isinstance(deployment.source, BuildOptions):
        source = msgspec.structs.replace(deployment.source, name=checkpoint_name_of(location))
        deployment = msgspec.structs.replace(deployment, source=source)
    return deployment


def local_path(location: str | Path, environment: Environment[str, str], progress: Progress | None = None) -> Path:
    """The local directory or file of `location`, which is fetched and unpacked if necessary, or the cached engine of this name or id.

    Raises ConfigError and CheckpointError.
    """
    path = Path(location).expanduser()
    if not path.is_dir() and path.suffix != ".gguf" and path.name not in configuration_files():
        if not path.exists() and "/" not in str(location):  # models of the hub have an owner
            if (engine := find_cached_engine(str(location))) is not None:
                return engine
            raise ConfigError(
                f"{location} does not exist.",
                cure="Name a directory, a .gguf file, ORG/NAME or s3://BUCKET/PREFIX, or an engine of stoker list.",
            )
        path = sources.resolve(str(location), token=find_secret("HF_TOKEN", environment), progress=progress)
    if not path.exists():
        raise ConfigError(f"{path} does not exist.", cure="Correct the path.")
    return path


def _read_container(environment: Environment[str, str]) -> Deployment:
    """The deployment of a SageMaker container. Raises ConfigError if neither the folder nor a model id is set."""
    if not CONTAINER.is_dir() and not (environment.get("HF_MODEL_ID") or environment.get("OPTION_MODEL_ID")):
        raise ConfigError(f"{CONTAINER} does not exist, and HF_MODEL_ID is not set.", cure="Name a folder: stoker serve DIR.")
    return load_lmi(CONTAINER, environment)


def prepare_engine(deployment: Deployment, environment: Environment[str, str], progress: Progress | None = None) -> PreparedEngine:
    """Fetch and complete a deployment, and build its engine from a checkpoint. Built engines are cached for all processes.

    Raises CheckpointError, ConfigError or EngineError. No message contains the value of a secret.
    """
    check_locations(deployment)
    source = deployment.source
    location = source.location if isinstance(source, EngineSource) else source.checkpoint
    local = fetch_location(location, source, environment, progress)
    complete = FORMATS.get(deployment.format).complete
    if complete is not None:
        deployment = complete(deployment, local)
    engine = _engine(deployment, local, environment, progress)
    deployment = with_built_draft_engine(with_local_drafts(deployment, environment, progress), engine, progress)
    return PreparedEngine(engine=engine, deployment=deployment, tokenizer=_tokenizer(deployment, engine, environment, progress))


def with_local_drafts(deployment: Deployment, environment: Environment[str, str], progress: Progress | None) -> Deployment:
    """A copy whose `runtime.speculate` is a proposer or a local directory. Draft heads of a hub id or address are fetched."""
    runtime, source = deployment.runtime, deployment.drafts
    if not uses_drafter(runtime) or Path(runtime.speculate).expanduser().is_dir():
        return deployment
    if source is None or source.location != runtime.speculate:  # named by an option
        source = EngineSource(location=runtime.speculate, token_secret="HF_TOKEN")
    local = fetch_location(source.location, source, environment, progress)
    return msgspec.structs.replace(deployment, runtime=msgspec.structs.replace(runtime, speculate=str(local)))


def check_locations(deployment: Deployment) -> None:
    """Raise ConfigError if the deployment names an absolute path of an engine or a tokenizer that does not exist."""
    source = deployment.source
    engine = source.location if isinstance(source, EngineSource) else None
    for kind, location in (("engine", engine), ("tokenizer", deployment.tokenizer)):
        if location and Path(location).is_absolute() and not Path(location).exists():
            raise ConfigError(f"{deployment.path} names the {kind} {location}, which does not exist.", cure="Correct the path.")


def _engine(deployment: Deployment, local: Path, environment: Environment[str, str], progress: Progress | None) -> Path:
    """The directory of the deployment's engine, which is built if the source is a checkpoint."""
    source = deployment.source
    if isinstance(source, BuildOptions) and "format_version" not in read_config(local):
        return _build(deployment, local, environment, progress)
    directory = Path(source.location) if isinstance(source, EngineSource) else local
    engine = directory if directory.is_dir() else local
    check_ranks(deployment, engine)
    return engine


def fetch_location(
    location: str, source: EngineSource | BuildOptions, environment: Environment[str, str], progress: Progress | None
) -> Path:
    """The local path of a location of `source`. The secret that `source` names is only read here, for the download."""
    token = find_secret(source.token_secret, environment) if source.token_secret else None
    if Path(location).expanduser().exists():
        return Path(location).expanduser()
    try:
        return sources.resolve(location, revision=source.revision, digest=source.digest, token=token, progress=progress)
    except AccessError as error:
        if token is not None or not source.token_secret:
            raise
        text = f"{error.message.rstrip('.')}, and the secret {source.token_secret} is not set."
        cure = f"Correct the name, or store a token with access to it in {secret_places(source.token_secret)}."
        raise CheckpointError(text, cure=cure) from None


def build_config(deployment: Deployment, tokenizer: Path | None = None) -> BuildConfig:
    """The configuration of the build. Raises ConfigError for a setting that the builder does not have."""
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


def check_build(settings: BuildSettings) -> None:
    """Raise ConfigError for a quantization or a dtype of the KV cache that does not exist. Imports torch if one is set."""
    if settings.quantization is not None or settings.kv_cache_dtype is not None:
        from stoker.builder.recipe import check_recipe

        check_recipe(settings.quantization, {}, settings.kv_cache_dtype)


def _build(deployment: Deployment, local: Path, environment: Environment[str, str], progress: Progress | None) -> Path:
    """The directory of the engine, which is built unless it is cached."""
    from stoker.builder.build import build_cached
    from stoker.runtime.aot import compile_kernels

    options = deployment.source
    assert isinstance(options, BuildOptions)
    tokenizer = fetch_location(options.tokenizer, options, environment, progress) if options.tokenizer else None
    config = build_config(deployment, tokenizer)
    changed = config.rotary_base is not None or config.rotary_scaling_type is not None
    # With other rotary positions, greedy tokens cannot be compared with those of the checkpoint.
    name, verify = options.name or checkpoint_name_of(options.checkpoint), "files" if changed else "auto"
    return build_cached(local, config, name=name, verify=verify, progress=progress, kernels=compile_kernels).path


def check_ranks(deployment: Deployment, engine: Path) -> None:
    """Raise ConfigError when the engine was built for another number of ranks than the deployment requires."""
    required, built = deployment.source.mapping, read_summary(engine).mapping
    if not isinstance(deployment.source, EngineSource) or required is None:
        return
    if required.world_size != built.world_size or (required.data_parallel > 1 and required.data_parallel != built.data_parallel):
        raise ConfigError(
            f"{deployment.path} requires {required}, and the engine {engine} was built for {built}.",
            cure="Make the two equal, or build the engine again.",
        )


def _tokenizer(deployment: Deployment, engine: Path, environment: Environment[str, str], progress: Progress | None) -> Path | None:
    """A directory with a tokenizer.json, or None for the engine's own, into which a build has copied the configured tokenizer."""
    if deployment.tokenizer is None or isinstance(deployment.source, BuildOptions) or Path(deployment.tokenizer) == engine:
        return None
    folder = fetch_location(deployment.tokenizer, deployment.source, environment, progress)
    return folder if (folder / "tokenizer.json").is_file() else None
