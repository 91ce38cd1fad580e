"""Chooses the recipe of a build: the requested quantization, or the formats of a pre-quantized checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.logging import get_logger
from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.builder.conversion.import_linear import import_format, is_widened
from stoker.builder.conversion.input_factors import has_input_factors
from stoker.builder.conversion.shard_plan import fit_recipe_to_shards
from stoker.builder.conversion.tensor_plan import TensorPlan, is_computed
from stoker.builder.prequantized.cache_scales import KV_CACHE
from stoker.builder.prequantized.compressed_tensors import kv_cache_scheme
from stoker.builder.prequantized.fp8 import block_size
from stoker.builder.prequantized.modelopt import kv_cache_algorithm, modelopt_settings
from stoker.core.model_config import AttentionConfig, ModelConfig
from stoker.core.specs import LinearSpec
from stoker.engine.config import EngineConfig
from stoker.layers.decoder import declare, layer_specs
from stoker.models import Architecture
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.dense import Dense
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int8_grouped import GroupedInt8
from stoker.quant.named_recipes import NARROW_HIDDEN_SIZE, canonical_recipe_name, find_recipe
from stoker.quant.recipe import AS_STORED, Recipe

CALIBRATION_SIZE = 32  # windows
# SmolLM2 in 47 s of CPU time instead of 162: its perplexity is 20.49 instead of 20.45 with 32 windows.
FP8_CALIBRATION_SIZE = 8

log = get_logger(__name__)


def choose_recipe(
    settings: BuildConfig, config: EngineConfig, plans: dict[str, TensorPlan], checkpoint: Checkpoint, architecture: Architecture
) -> Recipe:
    """The recipe of the engine `config`, with the calibration settings. Groups are made smaller if shards would otherwise cut them.

    Raises ConfigError for a quantization that is unknown, or does not apply to the model or the checkpoint.
    """
    recipe = _requested_or_stored(settings, config, plans, checkpoint, architecture)
    if settings.max_perplexity_increase is not None and not is_quantized(recipe):
        raise ConfigError("max_perplexity_increase is refused: nothing is quantized.", cure="Leave it out, or name a quantization.")
    config = msgspec.structs.replace(config, recipe=_with_calibration(settings, config, recipe))
    return fit_recipe_to_shards(config)


def check_recipe(quantization: str | None, settings: dict[str, Any], kv_cache_dtype: str | None) -> None:
    """Raise ConfigError for an unknown quantization, setting or dtype of the KV cache. Does not need the checkpoint."""
    requested = quantization and canonical_recipe_name(quantization)
    find_recipe(None if requested == AS_STORED else requested, settings, kv_cache_dtype)


def is_quantized(recipe: Recipe) -> bool:
    """Whether the recipe quantizes linears, by itself or as the checkpoint stores them, or the KV cache. Then accuracy is measured."""
    return recipe.name != "NO_QUANT" or recipe.kv_cache is not None


def is_calibrated(model: ModelConfig, recipe: Recipe) -> bool:
    """Whether a part of the recipe, such as a format or the KV cache, needs calibration."""
    if recipe.name == AS_STORED:  # scales of activations are stored in the checkpoint as well
        return recipe.kv_cache is not None and recipe.kv_scales == "measured"
    linears = [spec for i in range(model.num_layers) for spec in layer_specs(model, i).values() if isinstance(spec, LinearSpec)]
    return recipe.kv_cache is not None or any(recipe.format_for(spec).needs_calibration for spec in linears)


def _requested_or_stored(
    settings: BuildConfig, config: EngineConfig, plans: dict[str, TensorPlan], checkpoint: Checkpoint, architecture: Architecture
) -> Recipe:
    """The recipe that the settings request, or else the one in which the checkpoint is stored."""
    requested = settings.quantization and canonical_recipe_name(settings.quantization)
    if requested not in (None, AS_STORED):
        is_narrow = config.model.hidden_size <= NARROW_HIDDEN_SIZE and not config.model.requires_whole_prompt and not settings.dummy_weights
        return find_recipe(requested, settings.quantization_settings, settings.kv_cache_dtype, is_narrow)
    unquantized = find_recipe(None, settings.quantization_settings, settings.kv_cache_dtype)
    stored = _stored_recipe(config, plans, checkpoint) if plans else _described_recipe(config, checkpoint, architecture)
    if stored is None and requested is not None:
        raise ConfigError(f"{checkpoint.name} has no pre-quantized weights that can be imported.", cure="Name a quantization.")
    if settings.kv_cache_dtype is None and _has_cache_scales(config.model, checkpoint):
        stored = stored or Recipe(default=Dense(), name=AS_STORED)
        return msgspec.structs.replace(stored, kv_cache=KV_CACHE, kv_scales="stored")
    return unquantized if stored is None else msgspec.structs.replace(stored, kv_cache=unquantized.kv_cache)


def _has_cache_scales(model: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint stores the scales of an FP8 KV cache. Logs a warning for another format of the cache, or missing scales."""
    if not isinstance(checkpoint.weights, CanonicalWeights):
        return False
    scales, algorithm = checkpoint.weights.cache_scales, _cache_algorithm(checkpoint)
    if algorithm in (None, "FP8") and not scales.sources:
        return False
    if algorithm in (None, "FP8") and scales.covers(model.num_layers):
        return all(isinstance(layer.attention, AttentionConfig) for layer in model.layers)
    log.warning(
        "%s: the %s scales of its KV cache are not used, and the cache is not quantized. --kv-cache-dtype measures scales.",
        checkpoint.name,
        algorithm or "incomplete",
    )
    return False


def _cache_algorithm(checkpoint: Checkpoint) -> str | None:
    """The algorithm by which a checkpoint of ModelOpt or compressed-tensors quantizes the KV cache; None for none, and other methods."""
    quantization = checkpoint.setting("quantization_config") or {}
    if quantization.get("quant_method") == "modelopt":
        return kv_cache_algorithm(modelopt_settings(quantization))
    return kv_cache_scheme(quantization) if quantization.get("quant_method") == "compressed-tensors" else None


def _stored_recipe(config: EngineConfig, plans: dict[str, TensorPlan], checkpoint: Checkpoint) -> Recipe | None:
    """The recipe whose formats can store the weights of a pre-quantized checkpoint unchanged; None for other checkpoints.

    The most frequent format is the default, and all other linears are overrides.
    """
    linears = [spec for spec in declare(config.model).values() if isinstance(spec, LinearSpec)]
    imported = {spec.name: import_format(spec, plans, checkpoint.weights, config.model) for spec in linears}
    formats = {name: _with_dtype(found or Dense(), config.dtype) for name, found in imported.items()}
    unfolded = {spec.name for spec in linears if imported[spec.name] is None and has_input_factors(spec.name, plans, checkpoint.weights)}
    if unfolded:
        log.info(
            "%d linears are stored as %s: the checkpoint multiplies their inputs by factors that the linear before cannot have, because of "
            "grouped key-value heads or an activation. Their weights do not change, and their inputs are not rounded.",
            len(unfolded),
            config.dtype,
        )
    others = [spec for spec in linears if spec.name not in unfolded]
    widened = [formats[spec.name] for spec in others if is_widened(spec, imported[spec.name], plans, checkpoint.weights)]
    for wider, count in Counter(config.dtype if found == Dense() else "int8 in groups" for found in widened).items():
        log.info("%d linears are stored as %s, because no kernel reads all of their parts as the checkpoint stores them.", count, wider)
    counts = Counter(formats[spec.name] for spec in linears if spec.quantize and formats[spec.name] != Dense())
    default = counts.most_common(1)[0][0] if counts else Dense()
    recipe = Recipe(default=default, name=AS_STORED)
    overrides = {spec.name: formats[spec.name] for spec in linears if recipe.format_for(spec) != formats[spec.name]}
    return None if set(formats.values()) == {Dense()} else msgspec.structs.replace(recipe, overrides=overrides)


def _described_recipe(config: EngineConfig, checkpoint: Checkpoint, architecture: Architecture) -> Recipe | None:
    """The recipe that quantization_config describes, for a build without weights.

    Only block-scaled FP8, and MXFP4 of gpt-oss, which has all experts in it, can be determined without tensors. Logs a warning for other
    methods, because sizes and speed are then those of unquantized weights.
    """
    quantization = checkpoint.setting("quantization_config")
    if quantization is None:
        return None
    block = quantization.get("weight_block_size")
    linears = [spec for spec in declare(config.model).values() if isinstance(spec, LinearSpec) and spec.quantize]
    if quantization.get("quant_method") == "mxfp4":
        plain: dict[str, Format] = {spec.name: Dense() for spec in linears if not spec.num_experts}
        return Recipe(default=Fp4(), overrides=plain, name=AS_STORED)
    if quantization.get("quant_method") != "fp8" or not isinstance(block, list):
        log.warning(
            "%s: the quantization_config (%s) is not used without weights. Name a quantization instead, such as FP8 or AWQ.",
            checkpoint.name,
            quantization.get("quant_method", "unknown"),
        )
        return None
    rows, columns = block_size(block)
    names = architecture.tensor_names(config.model)
    overrides: dict[str, Format] = {}
    for spec in linears:
        if is_computed(f"{spec.name}.weight", names):
            overrides[spec.name] = Dense()
        elif (common := math.gcd(rows, *spec.parts)) != rows and len(spec.parts) > 1:
            overrides[spec.name] = BlockFp8(rows=common, columns=columns)
    return Recipe(default=BlockFp8(rows=rows, columns=columns), overrides=overrides, name=AS_STORED)


def _with_dtype(chosen: Format, dtype: str) -> Format:
    """`chosen` with `dtype` as the dtype of activations, if the format has such a setting (GroupedInt8); otherwise `chosen` itself."""
    return msgspec.structs.replace(chosen, dtype=dtype) if isinstance(chosen, GroupedInt8) else chosen


def _with_calibration(settings: BuildConfig, config: EngineConfig, recipe: Recipe) -> Recipe:
    """The recipe with the settings of calibration, which are a part of the engine's content address.

    Raises ConfigError for a prefix LM, whose layers cannot be calibrated on text.
    """
    if not is_calibrated(config.model, recipe):
        if unused := [name for name in ("calibration_data", "calibration_size") if getattr(settings, name) is not None]:
            log.warning("%s has no effect: %s is not calibrated.", " and ".join(unused), recipe.name)
        return recipe
    if config.model.requires_whole_prompt and config.weights == "files":
        cache = f" with a KV cache of {recipe.kv_cache}" if recipe.kv_cache else ""
        raise ConfigError(
            f"{recipe.name}{cache} is refused: it is calibrated on text, and {config.model.architecture} is a prefix LM, whose prompt "
            "tokens attend in both directions.",
            cure="Use WEIGHTS_ONLY_INT8, WEIGHTS_ONLY_INT4, FP8 or FP8_BLOCK, and do not quantize the KV cache.",
        )
    calibration = {
        "data": settings.calibration_data or "default",
        "size": settings.calibration_size or _default_calibration_size(recipe),
        "seq_len": settings.calibration_seq_len,
    }
    return msgspec.structs.replace(recipe, calibration=calibration)


def _default_calibration_size(recipe: Recipe) -> int:
    """The number of windows of a calibration. Error compensation of FP8 needs fewer than formats that measure ranges or have fewer bits."""
    formats = (recipe.default, *recipe.overrides.values())
    measured = [chosen for chosen in formats if chosen.needs_calibration]
    is_fp8 = all(isinstance(chosen, Fp8) and chosen.activations != "static" for chosen in measured)
    return FP8_CALIBRATION_SIZE if is_fp8 and recipe.kv_cache is None else CALIBRATION_SIZE
