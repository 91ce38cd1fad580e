"""Settings of a Truss that depend on each other: repository, quantization, tags, transport, secrets, ranks and devices."""

from __future__ import annotations

import re

from stoker.base.errors import ConfigError
from stoker.deploy.collected_settings import CollectedSettings, invalid_value
from stoker.deploy.deployment import EngineSource
from stoker.deploy.devices import check_world
from stoker.deploy.secrets import check_secret_name, secret_places
from stoker.deploy.truss.keys import CHECKPOINT_TO_BUILD, FINISHED_ENGINES, HEADS

OPENAI = "openai-compatible"
LEGACY = "force-legacy-api-non-openai-compatible"
_UNSUPPORTED_SOURCES = {"GCS": "Google Cloud Storage", "AZURE": "Azure", "BASETEN_TRAINING": "the training store of Baseten"}


def apply_dependent_settings(settings: CollectedSettings, gpus: int) -> None:
    """Add defaults and convert keys that have a meaning only together with others. `gpus` is the number of visible GPUs."""
    settings.pop("stack")
    _use_arguments(settings)
    _check_repository(settings, "repository.source", "build.checkpoint")
    _select_quantization(settings)
    _set_lengths(settings)
    _apply_tags(settings)
    _check_transport(settings)
    _select_secret_names(settings)
    _set_devices(settings, gpus)
    name = settings.pop("name")
    if name and settings.get("server.model_name") is None:
        settings.set("server.model_name", name.value, name.origin, name.key)
    settings.set_default("server.http_port", 8080)


def is_before_trt_llm(settings: CollectedSettings) -> bool:
    """Whether the Truss is of the oldest generation.

    In it, model_metadata or build.arguments names the engine or checkpoint, and the runtime settings are in packages/.
    """
    named = [settings.setting(name).key for name in ("engine.location", "engine.tokenizer", "build.checkpoint") if settings.get(name)]
    return bool({*FINISHED_ENGINES, CHECKPOINT_TO_BUILD} & set(named))


def _use_arguments(settings: CollectedSettings) -> None:
    """Convert build.arguments, which name an engine or a checkpoint. With an engine, settings of the build have no effect."""
    tokenizer = settings.get("engine.tokenizer") and settings.setting("engine.tokenizer")
    if not tokenizer or tokenizer.key != CHECKPOINT_TO_BUILD:
        return
    if settings.get("engine.location") is None:
        settings.pop("engine.tokenizer")
        settings.set("build.checkpoint", tokenizer.value, tokenizer.origin, tokenizer.key)
        return
    for target in settings.targets():
        if target.partition(".")[0] in ("build", "limits", "quantization", "quantization_type"):
            unused = settings.setting(target)
            settings.pop(target)
            settings.note(unused.key, "the engine is built already; the settings of its build apply", unused.origin, "warning")


def read_draft_repository(settings: CollectedSettings) -> EngineSource | None:
    """The repository of a draft model or of draft heads, which runtime.speculate then names. None: the mode has none.

    Raises PlacedError if it does not agree with the mode.
    """
    if settings.get("heads.location"):
        _check_repository(settings, "heads.source", "heads.location")
    found = {name: settings.pop(f"heads.{name}") for name in ("source", "location", "revision", "token_secret")}
    given = [setting for setting in found.values() if setting is not None]
    mode = settings.get("runtime.speculate")
    if mode == HEADS or (mode == "request" and given):
        setting, location = settings.setting("runtime.speculate"), found["location"]
        if location is None:
            limit = "it needs draft heads, which speculator.checkpoint_repository.repo must name"
            modes = "MEDUSA or EAGLE" if mode == HEADS else "DRAFT_TOKENS_EXTERNAL"
            limit = limit if mode == HEADS else "speculator.checkpoint_repository has no repo"
            raise invalid_value(setting.origin, setting.key, modes, limit, "Add checkpoint_repository with source and repo.")
        settings.pop("runtime.speculate")
        settings.set("runtime.speculate", location.value, location.origin, location.key)
        secret = found["token_secret"].value if found["token_secret"] else "hf_access_token"
        check_secret_name(secret)
        return EngineSource(location=location.value, revision=found["revision"].value if found["revision"] else None, token_secret=secret)
    if given:
        limit = "only DRAFT_TOKENS_EXTERNAL, MEDUSA and EAGLE have a repository"
        raise invalid_value(given[0].origin, given[0].key, given[0].value, limit, "Set speculative_decoding_mode to one of them.")
    return None


def _check_repository(settings: CollectedSettings, source_target: str, repo_target: str) -> None:
    """Convert the `repo` of a checkpoint_repository, whose form depends on `source`."""
    source = settings.pop(source_target)
    repo = settings.get(repo_target, "")
    if source is None:
        return
    if source.value in _UNSUPPORTED_SOURCES:
        limit = f"{_UNSUPPORTED_SOURCES[source.value]} is not supported"
        raise invalid_value(source.origin, source.key, source.value, limit, "Use HF, S3, LOCAL or REMOTE_URL.")
    prefixes = {"S3": ("s3://",), "REMOTE_URL": ("https://", "http://")}.get(source.value, ())
    setting = settings.setting(repo_target)
    if prefixes and not repo.startswith(prefixes):
        limit = f"source {source.value} needs an address that begins with {prefixes[0]}"
        raise invalid_value(setting.origin, setting.key, repo, limit, "Correct one of the two.")
    if not prefixes and "://" in repo:
        limit = f"source {source.value} does not accept an address"
        raise invalid_value(setting.origin, setting.key, repo, limit, "Set source to S3 or REMOTE_URL.")


def _select_quantization(settings: CollectedSettings) -> None:
    """Set the format of the weights and the dtype of the KV cache from quantization_type."""
    setting = settings.pop("quantization_type")
    weights, kv_cache_dtype = setting.value if setting else (None, None)
    if setting and weights:
        settings.set("build.quantization", weights, setting.origin, setting.key)
    if setting and kv_cache_dtype:
        settings.set("build.kv_cache_dtype", kv_cache_dtype, setting.origin, setting.key)
    for target in [target for target in settings.targets() if target.startswith("quantization.")] if not weights else ():
        unused = settings.setting(target)
        settings.pop(target)
        settings.note(unused.key, "nothing is calibrated without a quantization_type", unused.origin)


def _set_lengths(settings: CollectedSettings) -> None:
    """Set default lengths from max_seq_len."""
    total = settings.get("limits.max_total_len")
    for name in ("max_input_len", "max_output_len") if total else ():
        settings.set_default(f"limits.{name}", total - 1)


def _apply_tags(settings: CollectedSettings) -> None:
    """Set the format of requests from the tags in model_metadata."""
    setting = settings.pop("tags")
    tags = setting.value if setting else []
    if setting and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise invalid_value(setting.origin, setting.key, tags, "it must be a list of texts", "Write - openai-compatible under it.")
    if setting and LEGACY in tags and OPENAI in tags:
        limit = f"{OPENAI} and {LEGACY} exclude each other"
        raise invalid_value(setting.origin, setting.key, ", ".join(tags), limit, "Keep one of the two.")
    if setting and LEGACY in tags:
        settings.set("options.legacy", True, setting.origin, setting.key)
    if setting and OPENAI in tags and not is_before_trt_llm(settings):  # those accept messages in their own request format
        settings.set("options.openai", True, setting.origin, setting.key)
    if settings.get("engine.location") and settings.setting("engine.location").key == FINISHED_ENGINES[0]:
        settings.set_default("options.max_tokens_counts_prompt", True)


def _check_transport(settings: CollectedSettings) -> None:
    """Raise ConfigError for a transport other than http and grpc."""
    setting = settings.pop("transport")
    kind = setting.value.get("kind", "http") if setting and isinstance(setting.value, dict) else setting and setting.value
    if setting and kind not in ("http", "grpc"):
        raise invalid_value(setting.origin, f"{setting.key}.kind", kind, "only http and grpc are supported", "Remove it.")


def _select_secret_names(settings: CollectedSettings) -> None:
    """Convert secrets to their names. Values in the file are neither used nor printed."""
    setting = settings.pop("secrets")
    if setting is None:
        return
    if not isinstance(setting.value, dict):
        raise ConfigError(f"{setting.origin}: secrets must be a mapping of names.", cure="Write hf_access_token: null under it.")
    for name, value in setting.value.items():
        check_secret_name(name)
        if value:
            text = f"the value in the file is not used; store it in {secret_places(name)}"
            settings.note(f"secrets.{name}", text, setting.origin, "warning")
    settings.set("server.secrets", tuple(setting.value), setting.origin, "secrets")


def _set_devices(settings: CollectedSettings, gpus: int) -> None:
    """Check that the accelerator's count, the number of ranks and the visible GPUs agree. Raises ConfigError."""
    world_size = settings.get("mapping.tensor_parallel", 1) * settings.get("mapping.pipeline_parallel", 1)
    counts = [target for target in ("mapping.tensor_parallel", "mapping.pipeline_parallel") if settings.get(target) is not None]
    use_gpu, accelerator = settings.pop("resources.use_gpu"), settings.pop("resources.accelerator")
    if accelerator:
        match = re.fullmatch(r"([A-Za-z0-9_ ]{1,40})(?::([1-9]\d{0,3}))?", accelerator.value)
        if match is None:
            limit = "it must be NAME or NAME:COUNT"
            raise invalid_value(accelerator.origin, accelerator.key, accelerator.value, limit, "Write A100:2.")
        if int(match[2] or 1) != world_size:
            limit = f"tensor × pipeline parallel counts make {world_size} ranks"
            cure = f"Write {match[1]}:{world_size}, or change the counts."
            raise invalid_value(accelerator.origin, accelerator.key, accelerator.value, limit, cure)
        settings.note(accelerator.key, "the kind of GPU is for the platform; Stoker uses the visible GPUs", accelerator.origin)
    if use_gpu and not use_gpu.value and not accelerator:
        settings.set("runtime.device", "cpu", use_gpu.origin, use_gpu.key)
    elif counts:
        setting = settings.setting(counts[0])
        check_world(world_size, gpus, str(setting.origin), setting.key)
