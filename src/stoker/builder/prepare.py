"""Everything that is decided before a byte is written."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from stoker import __version__
from stoker.base.config import Mapping
from stoker.base.errors import CheckpointError, ConfigError
from stoker.builder.checkpoint.canonical_names import LogicalWeights
from stoker.builder.checkpoint.checkpoint import Checkpoint, open_checkpoint
from stoker.builder.checkpoint.fingerprint import fingerprint
from stoker.builder.checkpoint.hub import fetch
from stoker.builder.config import BuildConfig, fit_limits
from stoker.builder.conversion.shard_plan import check_shares, fit_recipe
from stoker.builder.conversion.tensor_plan import Making, plan
from stoker.builder.prequantized.import_weights import keepable
from stoker.core.model_config import ModelConfig, MoEConfig
from stoker.core.specs import LinearSpec
from stoker.engine.config import EngineConfig, Origin, Target
from stoker.layers.decoder import declare, layer_specs
from stoker.models import Architecture, check_version, resolve_architecture
from stoker.models.config_reader import read_model_config
from stoker.models.rotary_override import override_rotary
from stoker.quant.dense import Dense
from stoker.quant.format import Format
from stoker.quant.int8_grouped import GroupedInt8
from stoker.quant.names import NARROW, canonical, find_recipe
from stoker.quant.recipe import AS_STORED, Recipe

PLAIN = ("float32", "float16", "bfloat16")


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A build that only remains to be carried out. `config` has no files yet, and an empty fingerprint."""

    checkpoint: Checkpoint
    build: BuildConfig
    config: EngineConfig
    makings: dict[str, Making]  # empty for dummy weights

    def with_fingerprint(self, progress: Callable[[str, int, int], None] = lambda stage, done, total: None) -> Prepared:
        """The same with the checkpoint's fingerprint, which costs reading it once."""
        tokenizer = Path(self.build.tokenizer) if self.build.tokenizer else None
        others = sorted(f for f in tokenizer.iterdir() if f.is_file()) if tokenizer is not None and tokenizer.is_dir() else []
        found = fingerprint([*self.checkpoint.files, *others], partial(progress, "read"))
        origin = msgspec.structs.replace(self.config.checkpoint, fingerprint=found)
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, checkpoint=origin))


def prepare(source: str | Path, build: BuildConfig) -> Prepared:
    """Open the checkpoint and decide sizes, dtype and formats, and which tensors make which.

    Raises CheckpointError or ConfigError for anything that would stop the build later.
    """
    path, name = fetch(source)
    checkpoint = open_checkpoint(path, name, weights=not build.dummy_weights)
    architecture, model = read_model(checkpoint, build.versions)
    model = adapted(model, build)
    stored = checkpoint.config.get("quantization_config")
    checkpoint = dataclasses.replace(checkpoint, weights=LogicalWeights(checkpoint.weights, architecture, stored))
    target = find_target(build)
    check_mapping(build.mapping, model)
    config = EngineConfig(
        stoker_version=__version__,
        model=model,
        limits=fit_limits(build.limits, model.max_positions, build.shrinking),
        dtype=build.dtype or ("float32" if target.device == "cpu" else own_dtype(checkpoint)),
        mapping=build.mapping,
        target=target,
        weights="dummy" if build.dummy_weights else "files",
        checkpoint=Origin(name=name, fingerprint=""),
    )
    makings = {} if build.dummy_weights else plan(architecture, model, checkpoint.weights)
    config = msgspec.structs.replace(config, recipe=_find_recipe(build, config, makings, checkpoint))
    if build.max_perplexity_increase is not None and not quantizes(config.recipe):
        raise ConfigError("max_perplexity_increase is refused: nothing is quantized.", cure="Leave it out, or name a quantization.")
    config = msgspec.structs.replace(config, recipe=_measured_on(build, config))
    config = msgspec.structs.replace(config, recipe=fit_recipe(config))
    check_shares(config)
    return Prepared(checkpoint=checkpoint, build=build, config=config, makings=makings)


def _find_recipe(build: BuildConfig, config: EngineConfig, makings: dict[str, Making], checkpoint: Checkpoint) -> Recipe:
    """The one asked for; else that of weights which are quantized already."""
    asked = build.quantization and canonical(build.quantization)
    if asked not in (None, AS_STORED):
        narrow = config.model.hidden_size <= NARROW and not config.model.requires_whole_prompt and not build.dummy_weights
        return find_recipe(asked, build.quantization_settings, build.kv_cache_dtype, narrow)
    plain = find_recipe(None, build.quantization_settings, build.kv_cache_dtype)
    found = stored_recipe(config, makings, checkpoint) if makings else None
    if found is None and asked is not None:
        raise ConfigError(f"{checkpoint.name} holds no weights in few bits that can stay as they are.", cure="Name a quantization.")
    return plain if found is None else msgspec.structs.replace(found, kv_cache=plain.kv_cache)


def stored_recipe(config: EngineConfig, makings: dict[str, Making], checkpoint: Checkpoint) -> Recipe | None:
    """The formats that hold a quantized checkpoint's weights without change; None when it has none."""
    specs = [spec for spec in declare(config.model).values() if isinstance(spec, LinearSpec)]
    formats = {spec.name: _arithmetic(keepable(spec, makings, checkpoint.weights) or Dense(), config.dtype) for spec in specs}
    kept = Counter(formats[spec.name] for spec in specs if spec.quantize and formats[spec.name] != Dense())
    default = kept.most_common(1)[0][0] if kept else Dense()
    recipe = Recipe(default=default, name=AS_STORED)
    others = {spec.name: formats[spec.name] for spec in specs if recipe.format_for(spec) != formats[spec.name]}
    found = msgspec.structs.replace(recipe, overrides=others)
    return None if set(formats.values()) == {Dense()} else found


def _arithmetic(chosen: Format, dtype: str) -> Format:
    return msgspec.structs.replace(chosen, dtype=dtype) if isinstance(chosen, GroupedInt8) else chosen


def _measured_on(build: BuildConfig, config: EngineConfig) -> Recipe:
    """The recipe with what calibration will read, where it measures anything: it belongs to the engine's address.

    Raises ConfigError for a model that nothing can be measured on.
    """
    if not measures(config.model, config.recipe):
        return config.recipe
    if config.model.requires_whole_prompt and config.weights == "files":
        cache = f" over a cache of {config.recipe.kv_cache}" if config.recipe.kv_cache else ""
        raise ConfigError(
            f"{config.recipe.name}{cache} is refused: it is measured on text, and {config.model.architecture} reads its prompts in both "
            "directions.", cure="Use WEIGHTS_ONLY_INT8, WEIGHTS_ONLY_INT4, FP8 or FP8_BLOCK, and leave the cache as it is.",
        )  # fmt: skip
    asked = {"data": build.calibration_data or "default", "size": build.calibration_size, "seq_len": build.calibration_seq_len}
    return msgspec.structs.replace(config.recipe, calibration=asked)


def quantizes(recipe: Recipe) -> bool:
    """Whether an engine of this recipe says something else than its checkpoint, so that its accuracy is measured."""
    return recipe.name != "NO_QUANT" or recipe.kv_cache is not None


def measures(model: ModelConfig, recipe: Recipe) -> bool:
    """Whether something of the recipe is measured by calibration."""
    if recipe.name == AS_STORED:  # scales of activations are stored too
        return recipe.kv_cache is not None
    linears = [spec for i in range(model.num_layers) for spec in layer_specs(model, i).values() if isinstance(spec, LinearSpec)]
    return recipe.kv_cache is not None or any(recipe.format_for(spec).needs_calibration for spec in linears)


def check_mapping(mapping: Mapping, model: ModelConfig) -> None:
    """Raise ConfigError for a mapping that this model has no use for."""
    stages = mapping.pipeline_parallel
    if stages > model.num_layers:
        raise ConfigError(f"pipeline_parallel={stages}: the model has {model.num_layers} layers.", cure="Lower it.")
    if mapping.expert_parallel and mapping.tensor_parallel == 1:
        raise ConfigError("expert_parallel is refused: one rank has all experts.", cure="Leave it out, or raise tensor_parallel.")
    if mapping.expert_parallel and not any(isinstance(layer.mlp, MoEConfig) for layer in model.layers):
        raise ConfigError("expert_parallel is refused: the model has no experts.", cure="Leave it out.")


def read_model(checkpoint: Checkpoint, versions: dict[str, str] | None = None) -> tuple[Architecture, ModelConfig]:
    """The architecture that config.json names, and the model it describes.

    `versions` decide where config.json leaves them open. Raises ConfigError for a version that it contradicts.
    """
    versions = versions or {}
    architecture = resolve_architecture(checkpoint.config)
    for option, value in versions.items():
        check_version(architecture, checkpoint.config, option, value)
    try:
        return architecture, read_model_config(architecture, checkpoint.config | versions)
    except CheckpointError as problem:
        raise CheckpointError(f"{checkpoint.name}: {problem.message}", cure=problem.cure) from None


def adapted(model: ModelConfig, build: BuildConfig) -> ModelConfig:
    """`model` with the build's own rotary settings. Raises ConfigError for a rotary_dim that is not the checkpoint's."""
    dims = {layer.attention.rope.dim for layer in model.layers if layer.attention.rope is not None}
    if build.rotary_dim is not None and dims != {build.rotary_dim}:
        found = " or ".join(map(str, sorted(dims))) or "no rotary positions"
        raise ConfigError(f"rotary_dim={build.rotary_dim}: the checkpoint has {found}.", cure="Leave it out.")
    if not build.changes_positions:
        return model
    return override_rotary(model, base=build.rotary_base, scaling=build.rotary_scaling_type, factor=build.rotary_scaling_factor)


def own_dtype(checkpoint: Checkpoint) -> str:
    """The dtype config.json names, else that of the most bytes; float32 for anything else."""
    named = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "").removeprefix("torch.")
    if named in PLAIN:
        return named
    totals = dict.fromkeys(PLAIN, 0)
    for stored in checkpoint.weights.stored.values():
        if (name := str(stored.dtype).removeprefix("torch.")) in totals:
            totals[name] += stored.num_bytes
    return max(totals, key=lambda name: totals[name])


def find_target(build: BuildConfig) -> Target:
    """The device asked for, else a GPU where there is one."""
    here = torch.cuda.is_available()
    device = build.device or ("cuda" if here else "cpu")
    if device == "cpu":
        return Target()
    capability = build.compute_capability
    if capability is None and here:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return Target(device=device, compute_capability=capability)
