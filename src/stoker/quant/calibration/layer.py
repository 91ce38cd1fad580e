"""Calibrated quantization of one layer. The build calls it layer by layer, so that the weights of one layer are in memory at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.model_config import LayerConfig
from stoker.core.specs import LinearSpec, Spec
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.calibration.scale_folding import ScaleFold, fold_factors, scale_folds, tie_features
from stoker.quant.recipe import Recipe


def quantize_layer(
    config: LayerConfig, name: str, specs: dict[str, Spec], recipe: Recipe, weights: dict[str, Tensor], stats: dict[str, InputStats]
) -> dict[str, Tensor]:
    """The stored tensors of a layer, quantized with `stats` of the inputs of its linears. Removes the dense tensors from `weights`.

    Keys of `weights` and of the result are full engine names; those of `stats` are names of linears.
    """
    linears = {spec.name: spec for spec in specs.values() if isinstance(spec, LinearSpec)}
    stats = dict(stats)
    for fold in scale_folds(config, name):
        _fold_scales(fold, linears, recipe, weights, stats)
    stored: dict[str, Tensor] = {}
    for spec in specs.values():
        if not isinstance(spec, LinearSpec):
            stored[spec.name] = weights.pop(spec.name)
            continue
        quantized = recipe.format_for(spec).quantize(weights.pop(f"{spec.name}.weight"), spec, stats.get(spec.name))
        stored |= {f"{spec.name}.{suffix}": tensor.contiguous() for suffix, tensor in quantized.items()}
        if spec.bias:
            stored[f"{spec.name}.bias"] = weights.pop(f"{spec.name}.bias")
    return stored


def _fold_scales(
    fold: ScaleFold, linears: dict[str, LinearSpec], recipe: Recipe, weights: dict[str, Tensor], stats: dict[str, InputStats]
) -> None:
    """Apply one scale fold to the weights and the statistics, if its first consumer was measured and its format chooses factors."""
    first = linears[fold.consumers[0]]
    if first.name not in stats:
        return
    rows = torch.cat([weights[f"{consumer}.weight"].flatten(0, -2) for consumer in fold.consumers])
    factors = recipe.format_for(first).folding_factors(rows, first, tie_features(stats[first.name], fold))
    if factors is None:
        return
    factors = fold_factors(fold, factors, weights)
    for consumer in fold.consumers:
        if consumer in stats:
            stats[consumer] = stats[consumer].divided_by(factors)
