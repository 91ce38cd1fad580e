"""Quantizes the layers of a model one after the other, by the inputs that calibration text produces.

Each layer runs on the output of the quantized layers before it. Its dense version records the inputs of its linears; it is quantized; and
the quantized version produces the input of the next layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stoker.builder.build_plan import BuildPlan
from stoker.builder.calibration.calibration_text import calibration_windows
from stoker.builder.calibration.recording import CacheRecordingLoader, CheckpointTensorSource, InputRecordingLoader, dense_tensors
from stoker.builder.calibration.saved_layers import CalibratedTensors, SavedLayers, calibration_folder, discard_folder
from stoker.builder.recipe import is_calibrated
from stoker.core.specs import LinearSpec
from stoker.distributed.group import SINGLE
from stoker.engine.layerwise import LayerwiseModel
from stoker.layers.decoder import kv_cache_specs, layer_specs
from stoker.layers.loader import Loader
from stoker.quant.calibration.cache_stats import CacheStats
from stoker.quant.calibration.layer import quantize_layer
from stoker.quant.calibration.recorder import check_counts
from stoker.quant.format import TensorTable
from stoker.quant.recipe import AS_STORED, Recipe


def calibrate_layers(plan: BuildPlan, work: Path, progress: Callable[[str, int, int], None]) -> CalibratedTensors | None:
    """Quantize the layers of the build by its calibration text. None if no format needs calibration. `work` contains the tokenizer."""
    if not _needs_calibration(plan):
        return None
    settings = plan.settings
    length = min(settings.calibration_seq_len, plan.config.model.max_positions)
    return calibrate(plan, calibration_windows(work, settings.calibration_data, plan.config.recipe.calibration["size"], length), progress)


def discard_saved_layers(plan: BuildPlan) -> None:
    """Remove the layers that calibrations of this build saved. Called after the engine was published."""
    if _needs_calibration(plan):
        discard_folder(calibration_folder(plan.config))


def _needs_calibration(plan: BuildPlan) -> bool:
    """Whether a format of the recipe, or its KV cache, needs calibration."""
    return plan.config.weights == "files" and is_calibrated(plan.config.model, plan.config.recipe)


@torch.inference_mode()
def calibrate(plan: BuildPlan, tokens: list[Tensor], progress: Callable[[str, int, int], None]) -> CalibratedTensors:
    """Quantize every layer by its inputs for `tokens`, int32 windows of token ids. Continues an interrupted calibration.

    `progress` receives (stage, layers done, number of layers).
    """
    config = plan.config
    saved = SavedLayers(calibration_folder(config), tokens)
    model = LayerwiseModel(config.model, tokens)
    dense = Loader(CheckpointTensorSource(plan.converter()), Recipe(), plan.dtype, plan.device, SINGLE)
    # The keys and values that a layer shares with later ones are not saved.
    if not config.model.shares_caches and (resumed := saved.resume()) is not None:
        model.layer, model.hidden = resumed
    else:
        model.embed(dense)
    while model.layer < config.model.num_layers:
        progress("calibrate", model.layer, config.model.num_layers)
        index = model.layer
        stored = _quantize_next_layer(plan, model, dense)
        saved.save(index, stored, model.hidden)
    progress("calibrate", model.layer, config.model.num_layers)
    return CalibratedTensors(saved)


def _quantize_next_layer(plan: BuildPlan, model: LayerwiseModel, dense: Loader) -> dict[str, Tensor]:
    """Quantize the next layer of `model`, or import it if it is stored as it is, and run it with the stored tensors.

    Returns these by engine name. `dense` loads the layer's unquantized weights, which are run first if inputs must be measured.
    """
    config, recipe, index = plan.config.model, plan.config.recipe, model.layer
    specs = layer_specs(config, index)
    if recipe.name == AS_STORED:
        converter = plan.converter(torch.device("cpu"))
        imported = {name: tensor.to(dense.device) for spec in specs.values() for name, tensor in converter.convert(spec)}
        return _run_quantized_layer(plan, model, dense, imported)
    weights = {name: tensor for spec in specs.values() for name, tensor in dense_tensors(spec, dense).items()}
    recorder = InputRecordingLoader(TensorTable(weights), recipe, dense.dtype, dense.device)
    if any(recipe.format_for(spec).needs_calibration for spec in specs.values() if isinstance(spec, LinearSpec)):
        model.run_layer(recorder, discard_output=True)
        check_counts(recorder.stats)
    stored = quantize_layer(config.layers[index], f"layers.{index}", specs, recipe, weights, recorder.stats)
    return _run_quantized_layer(plan, model, dense, stored)


def _run_quantized_layer(plan: BuildPlan, model: LayerwiseModel, dense: Loader, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the next layer of `model` with the stored tensors. Returns these, with the tensors of a quantized KV cache added."""
    config, recipe, index = plan.config.model, plan.config.recipe, model.layer
    without_cache = msgspec.structs.replace(recipe, kv_cache=None)
    attention = config.layers[index].attention
    if recipe.kv_cache is None or attention is None or config.kv_layer(index) != index:
        model.run_layer(Loader(TensorTable(stored), without_cache, dense.dtype, dense.device, SINGLE))
        return stored
    stats = CacheStats(attention, recipe.kv_cache, model.rope_tables(dense.device).get(attention.cached_rope))
    model.run_layer(CacheRecordingLoader(TensorTable(stored), without_cache, dense.dtype, dense.device, stats))
    cache_tensors = stats.tensors()
    return stored | {spec.name: cache_tensors[key] for key, spec in kv_cache_specs(config, index, recipe.kv_cache).items()}
