"""Makes all decisions of a build before anything is written: sizes, dtype, target, recipe, and the sources of each tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from stoker import __version__
from stoker.base.config import Mapping
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.build_plan import BuildPlan
from stoker.builder.checkpoint.checkpoint import Checkpoint, open_checkpoint
from stoker.builder.checkpoint.fingerprint import fingerprint
from stoker.builder.checkpoint.location import locate_checkpoint
from stoker.builder.config import BuildConfig, fit_limits
from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.builder.conversion.memory_cost import report_memory_cost
from stoker.builder.conversion.shard_plan import check_shards
from stoker.builder.conversion.tensor_plan import plan_tensors
from stoker.builder.conversion.tied_head import untie_different_head
from stoker.builder.recipe import check_recipe, choose_recipe
from stoker.core.model_config import Mamba2Config, ModelConfig, MoEConfig, StateConfig
from stoker.distributed.pipeline import stage_layers
from stoker.engine.config import CheckpointOrigin, EngineConfig, Target
from stoker.models import Architecture, check_version, resolve_architecture
from stoker.models.config_reader import read_model_config
from stoker.models.rotary_override import override_rotary
from stoker.quant.recipe import AS_STORED

_DTYPES = ("float32", "float16", "bfloat16")


def prepare(source: str | Path, settings: BuildConfig, name: str | None = None) -> BuildPlan:
    """Open the checkpoint at the path `source` and plan its build. `name` is the checkpoint's name; by default that of the path.

    Raises CheckpointError or ConfigError for anything that would stop the build later. Reads headers, and weights only of a head
    that may differ from the embedding to which config.json ties it.
    """
    check_recipe(settings.quantization, settings.quantization_settings, settings.kv_cache_dtype)
    path, name = locate_checkpoint(source, name)
    checkpoint = _with_quantization(open_checkpoint(path, name, weights=False))
    architecture, model = read_model(checkpoint, settings.versions, settings.ignored_config_keys)  # before weights are required
    if checkpoint.gguf is None and not settings.dummy_weights:
        checkpoint = dataclasses.replace(checkpoint, weights=open_checkpoint(path, name).weights)
    model = _apply_rotary_settings(model, settings)
    weights = CanonicalWeights(checkpoint.weights, architecture, checkpoint.setting("quantization_config"))
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    model = untie_different_head(architecture, model, checkpoint.weights)
    target = _choose_target(settings)
    _check_mapping(settings.mapping, model)
    config = EngineConfig(
        stoker_version=__version__,
        model=model,
        limits=fit_limits(settings.limits, model.max_positions, settings.shrinking),
        dtype=settings.dtype or ("float32" if target.device == "cpu" else _checkpoint_dtype(checkpoint)),
        mapping=settings.mapping,
        target=target,
        weights="dummy" if settings.dummy_weights else "files",
        checkpoint=CheckpointOrigin(name=name, fingerprint=""),
    )
    plans = {} if settings.dummy_weights else plan_tensors(architecture, model, checkpoint.weights)
    config = msgspec.structs.replace(config, recipe=choose_recipe(settings, config, plans, checkpoint, architecture))
    if config.recipe.name in (AS_STORED, "NO_QUANT") and settings.quantization is None:
        report_memory_cost(name, weights, config, plans)
    check_shards(config)
    return BuildPlan(checkpoint=checkpoint, settings=settings, config=config, tensor_plans=plans)


def add_fingerprint(plan: BuildPlan, progress: Callable[[str, int, int], None] = lambda stage, done, total: None) -> BuildPlan:
    """The plan with the checkpoint's fingerprint. Every file is read once. `progress` receives ("read", bytes done, total bytes)."""
    directory = Path(plan.settings.tokenizer) if plan.settings.tokenizer else None
    tokenizer_files = sorted(f for f in directory.iterdir() if f.is_file()) if directory is not None and directory.is_dir() else []
    found = fingerprint([*plan.checkpoint.files, *tokenizer_files], partial(progress, "read"))
    origin = msgspec.structs.replace(plan.config.checkpoint, fingerprint=found)
    return msgspec.structs.replace(plan, config=msgspec.structs.replace(plan.config, checkpoint=origin))


def read_model(
    checkpoint: Checkpoint, versions: dict[str, str] | None = None, ignored_keys: tuple[str, ...] = ()
) -> tuple[Architecture, ModelConfig]:
    """The architecture that config.json names, and the model it describes.

    `versions` are options such as gpt_model_version: they decide what config.json leaves open. `ignored_keys` are patterns (fnmatch) of
    keys that config.json may contain although they have no effect. Raises ConfigError for a version that contradicts config.json, and
    CheckpointError for a config.json that is not supported.
    """
    versions = versions or {}
    architecture = resolve_architecture(checkpoint.config)
    for option, value in versions.items():
        check_version(architecture, checkpoint.config, option, value)
    if checkpoint.gguf is not None:
        architecture = checkpoint.gguf.adapt(architecture)
    try:
        return architecture, read_model_config(architecture, checkpoint.config | versions, (*ignored_keys, *versions))
    except CheckpointError as problem:
        raise CheckpointError(f"{checkpoint.name}: {problem.message}", cure=problem.cure) from None


def _apply_rotary_settings(model: ModelConfig, settings: BuildConfig) -> ModelConfig:
    """The model with the rotary settings of the build. Raises ConfigError for a rotary_dim that differs from the checkpoint's."""
    dims = {rope.dim for rope in model.ropes}
    if settings.rotary_dim is not None and dims != {settings.rotary_dim}:
        found = " or ".join(map(str, sorted(dims))) or "no rotary positions"
        raise ConfigError(f"rotary_dim={settings.rotary_dim}: the checkpoint has {found}.", cure="Leave it out.")
    if not settings.changes_positions:
        return model
    return override_rotary(model, base=settings.rotary_base, scaling=settings.rotary_scaling_type, factor=settings.rotary_scaling_factor)


def _with_quantization(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint whose config contains the settings of hf_quant_config.json, which ModelOpt writes, in quantization_config.

    Raises CheckpointError when quantization_config is not an object: the weights would be misread.
    """
    value, extra = checkpoint.setting("quantization_config"), checkpoint.read_json("hf_quant_config.json")
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(
            f"{checkpoint.name}: config.json: quantization_config={str(value)[:60]!r} is not an object.", cure="Correct config.json."
        )
    if not extra or (value or {}).get("quant_method", "modelopt") != "modelopt":
        return checkpoint
    merged = {"quant_method": "modelopt"} | extra | (value or {})
    return dataclasses.replace(checkpoint, config=checkpoint.config | {"quantization_config": merged})


def _checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that config.json names, or else the dtype of the largest part of the weights.

    Without weights, it is bfloat16 for a quantized checkpoint, as for those that are published, and otherwise float32, the default of
    transformers.
    """
    named = str(checkpoint.setting("dtype") or checkpoint.setting("torch_dtype") or "").removeprefix("torch.")
    if named in _DTYPES:
        return named
    num_bytes = dict.fromkeys(_DTYPES, 0)
    for info in checkpoint.weights.tensors.values():
        if (name := str(info.dtype).removeprefix("torch.")) in num_bytes:
            num_bytes[name] += info.num_bytes
    if not any(num_bytes.values()) and checkpoint.setting("quantization_config") is not None:
        return "bfloat16"
    return max(num_bytes, key=lambda name: num_bytes[name])


def _choose_target(settings: BuildConfig) -> Target:
    """The device that was requested, or else a GPU if this machine has one, or else the CPU."""
    has_gpu = torch.cuda.is_available()
    device = settings.device or ("cuda" if has_gpu else "cpu")
    if device == "cpu":
        return Target()
    capability = settings.compute_capability
    if capability is None and has_gpu:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return Target(device=device, compute_capability=capability)


def _check_mapping(mapping: Mapping, model: ModelConfig) -> None:
    """Raise ConfigError for a mapping that does not apply to the model."""
    stages = mapping.pipeline_parallel
    if stages > model.num_layers:
        raise ConfigError(f"pipeline_parallel={stages}: the model has {model.num_layers} layers.", cure="Lower it.")
    _check_shared_caches(model, stages)
    if mapping.data_parallel > 1:
        _check_data_parallel(mapping, model)
    for state in dict.fromkeys(layer.state for layer in model.layers if layer.state is not None):
        _check_state_shards(state, mapping.tensor_parallel)
    if mapping.expert_parallel and mapping.stage_size == 1:
        cure = "Leave it out, or raise tensor_parallel or data_parallel."
        raise ConfigError("expert_parallel is refused: one rank has all experts.", cure=cure)
    if mapping.expert_parallel and not any(isinstance(layer.mlp, MoEConfig) for layer in model.layers):
        raise ConfigError("expert_parallel is refused: the model has no experts.", cure="Leave it out.")


def _check_shared_caches(model: ModelConfig, stages: int) -> None:
    """Raise ConfigError if a layer reads the keys and values of a layer of another stage."""
    for stage in range(stages):
        layers = stage_layers(model.num_layers, stages, stage)
        for layer in layers:
            if (shared := model.kv_layer(layer)) not in layers:
                raise ConfigError(
                    f"pipeline_parallel={stages} is refused: layer {layer} reads the keys and values of layer {shared}, which would be in "
                    "another stage.",
                    cure="Lower it, or use tensor_parallel.",
                )


def _check_data_parallel(mapping: Mapping, model: ModelConfig) -> None:
    """Raise ConfigError if the sequences cannot be distributed over `data_parallel` ranks."""
    given = f"data_parallel={mapping.data_parallel} is refused"
    if not mapping.expert_parallel:
        cure = "Add expert_parallel, or serve several engines of one rank behind stoker route."
        raise ConfigError(f"{given}: it distributes the experts of a mixture of experts over the ranks.", cure=cure)
    for name in ("tensor_parallel", "pipeline_parallel"):
        if (value := getattr(mapping, name)) > 1:
            raise ConfigError(f"{given}: it cannot be combined with {name}={value}.", cure=f"Use {name}=1.")
    if model.has_state or model.requires_whole_prompt:
        kind = "recurrent states" if model.has_state else "attention in both directions over the prompt"
        raise ConfigError(f"{given}: the model has {kind}.", cure="Use tensor_parallel.")


def _check_state_shards(state: StateConfig, size: int) -> None:
    """Raise ConfigError if `size` ranks cannot divide the heads of a block with a state among themselves, each with whole groups."""
    heads, groups = state.num_heads, state.key_heads
    if heads % size or (groups % size and size % groups):
        limit = f"it must divide the {heads} heads of the recurrent states, and divide or be a multiple of their {groups} groups"
        raise ConfigError(f"tensor_parallel={size} is refused: {limit}.", cure="Use another number of ranks.")
    if isinstance(state, Mamba2Config) and state.norm is not None and state.norm_groups > 1 and state.norm_groups % size:
        limit = f"it must divide the {state.norm_groups} groups of the norm of the recurrent states"
        raise ConfigError(f"tensor_parallel={size} is refused: {limit}.", cure="Use another number of ranks.")
