"""From the arguments of `LLM` to an engine directory on this machine: fetches and builds it if necessary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.api.settings import Choices
from stoker.base import env
from stoker.base.config import RequestLimits, RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.deploy.build_settings import BuildSettings, apply_build_settings
from stoker.deploy.deployment import BuildOptions, Deployment
from stoker.deploy.engine import read_config
from stoker.deploy.model_name import model_name_of
from stoker.deploy.prepare import PreparedEngine, Progress, check_build, local_path, prepare_engine, read_deployment
from stoker.deploy.runtime_checks import check_device, check_runtime, override_runtime, with_runtime_limits
from stoker.engine.config import EngineConfig
from stoker.engine.reader import Engine
from stoker.quant.named_recipes import canonical_recipe_name


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of InProcessEngine."""

    path: Path
    config: RuntimeConfig
    tokenizer: Path | None
    limits: RequestLimits
    name: str


def prepare_model(model: str | Path, tokenizer: str | Path | None, choices: Choices, progress: Progress | None) -> PreparedModel:
    """The engine of `model`, which may be any location that `stoker serve` accepts. Built engines are cached.

    Raises ConfigError, before anything is fetched or built if possible, CheckpointError or EngineError.
    """
    environment = env.child_environment()
    runtime, build = RuntimeConfig(**choices.runtime), choices.build
    check_device(runtime.device, environment)
    check_build(build)
    location = _with_revision(model, choices.revision)
    deployment = read_deployment(location, environment, progress)
    if isinstance(deployment.source, BuildOptions):
        build = _without_stored_method(build, deployment.source)
        deployment = with_runtime_limits(apply_build_settings(deployment, build), runtime)
    deployment = msgspec.structs.replace(deployment, runtime=override_runtime(deployment.runtime, choices.runtime))
    if tokenizer is not None:
        deployment = _with_tokenizer(deployment, local_path(tokenizer, environment, progress))
    check_runtime(deployment, environment)
    prepared = prepare_engine(deployment, environment, progress)
    limits = _check_built(prepared.engine, build, prepared.deployment.server.request_limits)
    return PreparedModel(
        path=prepared.engine,
        config=prepared.deployment.runtime,
        tokenizer=_tokenizer(prepared, tokenizer),
        limits=limits,
        name=prepared.deployment.server.model_name or model_name_of(model),
    )


def _with_revision(model: str | Path, revision: str | None) -> str | Path:
    """The model at this revision of its hub repository. Raises ConfigError if it is not a hub id."""
    if revision is None:
        return model
    if "://" in str(model) or Path(model).expanduser().exists():
        raise ConfigError(f"revision={revision!r} is refused: {model} is not a hub id.", cure="Leave it out.")
    return f"hf://{model}@{revision}"


def _without_stored_method(build: BuildSettings, source: BuildOptions) -> BuildSettings:
    """`build` without a quantization that names the method of a pre-quantized checkpoint, which is read as it is stored."""
    stored = read_config(Path(source.checkpoint)).get("quantization_config")
    method = str(stored.get("quant_method", "")).lower() if isinstance(stored, dict) else ""
    named = (build.quantization or "").lower().removesuffix("_marlin")
    return msgspec.structs.replace(build, quantization=None) if method and named == method else build


def _with_tokenizer(deployment: Deployment, folder: Path) -> Deployment:
    """The deployment with the tokenizer in `folder`: converted by the build, or for a built engine used as it is. Raises ConfigError."""
    if isinstance(deployment.source, BuildOptions):
        return msgspec.structs.replace(deployment, source=msgspec.structs.replace(deployment.source, tokenizer=str(folder)))
    if not (folder / "tokenizer.json").is_file():
        cure = "Name a folder with a tokenizer.json, or the checkpoint of the model, whose tokenizer the build converts."
        raise ConfigError(f"tokenizer={str(folder)!r} is refused: it has no tokenizer.json.", cure=cure)
    return msgspec.structs.replace(deployment, tokenizer=str(folder))


def _tokenizer(prepared: PreparedEngine, requested: str | Path | None) -> Path | None:
    """The directory of the tokenizer. A build has copied the requested one into the engine."""
    if requested is None or isinstance(prepared.deployment.source, BuildOptions):
        return prepared.tokenizer
    return Path(prepared.deployment.tokenizer) if prepared.deployment.tokenizer else None


def _check_built(path: Path, build: BuildSettings, limits: RequestLimits) -> RequestLimits:
    """`limits` lowered to the lengths in `build`. Raises ConfigError for settings that the engine does not have.

    An engine that was built now has them; a deployment that is read as a checkpoint can contain a prebuilt engine.
    """
    engine = Engine.open(path)
    lowered = {}
    for name, value in build.chosen().items():
        if name in RequestLimits.__struct_fields__:
            lowered[name] = _lower(name, value, engine.config)
        elif not _is_built_with(name, value, engine):
            message = f"{name}={value} is refused: {path} is an engine, and only a build can change it."
            raise ConfigError(message, cure="Leave it out, or name the checkpoint.")
    return msgspec.structs.replace(limits, **lowered)


def _lower(name: str, value: Any, config: EngineConfig) -> int:
    """The lower limit `value` for the setting `name` of a built engine. Raises ConfigError if the engine has a smaller one."""
    built: int = config.limits.max_seq_len if name == "max_total_len" else getattr(config.limits, name)
    if not 0 < value <= built:
        raise ConfigError(
            f"{name}={value} is refused: the engine was built for {built}.", cure=f"Use 1 to {built}, or name the checkpoint."
        )
    return int(value)


def _is_built_with(name: str, value: Any, engine: Engine) -> bool:
    """Whether the engine has the value of this build setting."""
    config = engine.config
    match name:
        case "dtype":
            return bool(value == config.dtype)
        case "quantization":
            return canonical_recipe_name(value) == config.recipe.name
        case "kv_cache_dtype":
            return value in ("auto", str(engine.kv_dtype).removeprefix("torch."))
        case "tensor_parallel" | "pipeline_parallel" | "data_parallel" | "expert_parallel":
            return bool(value == getattr(config.mapping, name))
    return name == "trust_remote_code"  # an engine contains no code of its checkpoint
