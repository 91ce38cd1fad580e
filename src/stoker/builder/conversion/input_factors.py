"""Folds factors by which a checkpoint multiplies the input of a linear (smoothers, AWQ) into the scales of the linear before it.

The scales of the rows that compute an input are multiplied by the factors, so that no quantized value changes. Factors of a linear whose
input is computed in another way stay in its weight, which is then stored in plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from stoker.builder.checkpoint.weights import CheckpointWeights
from stoker.builder.conversion.tensor_plan import TensorPlan
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.layers.decoder import layer_specs
from stoker.quant.calibration.scale_folding import ScaleFold, scale_folds
from stoker.quant.format import Format

_PER_ROW = ("scale", "offset")  # stored tensors in which a row can be multiplied by a number
_LAYER = re.compile(r"layers\.(\d+)\.")


def has_input_factors(name: str, plans: Mapping[str, TensorPlan], weights: CheckpointWeights) -> bool:
    """Whether the checkpoint multiplies the input of the linear `name`."""
    return any(source in weights.input_factors for group in plans[f"{name}.weight"].sources for source in group)


def folds_of(name: str, model: ModelConfig) -> list[ScaleFold]:
    """The folds in the layer of the linear `name` from one linear into another, feature by feature."""
    match = _LAYER.match(name)
    folds = scale_folds(model.layers[int(match[1])], match[0].removesuffix(".")) if match else []
    return [fold for fold in folds if fold.linear and fold.repeats == 1 and len(fold.consumers) == 1]


def linear_of(name: str, model: ModelConfig) -> LinearSpec:
    """The linear `name` of a layer. Raises KeyError for other names."""
    match = _LAYER.match(name)
    if match is not None:
        for spec in layer_specs(model, int(match[1])).values():
            if spec.name == name and isinstance(spec, LinearSpec):
                return spec
    raise KeyError(name)


def can_scale_rows(chosen: Format, spec: LinearSpec) -> bool:
    """Whether a format has a float32 scale for each row, or for each group of a row."""
    scale = chosen.layout(spec, torch.float32).get("scale")
    return scale is not None and scale.dtype == torch.float32 and scale.row_axis is not None and scale.row_unit == 1


def scale_rows(stored: dict[str, Tensor], fold: ScaleFold, factors: Tensor) -> None:
    """Multiply the rows of `fold` by `factors` [(experts,) rows] in the stored tensors of its linear."""
    start, stop = fold.rows
    for suffix in _PER_ROW:
        if suffix in stored:
            rows = stored[suffix] = stored[suffix].clone()
            axis = factors.dim() - 1
            part = rows.narrow(axis, start, stop - start)
            part.mul_(factors.to(rows.dtype).reshape(*factors.shape, *(1,) * (part.dim() - factors.dim())))


def read_factors(name: str, plans: Mapping[str, TensorPlan], weights: CheckpointWeights) -> Tensor:
    """The factors of the input of the linear `name`, float32 [in], or [experts, in] of stacked ones."""
    plan = plans[f"{name}.weight"]
    factors = [weights.read_input_factors(group[0]) for group in plan.sources]
    return torch.stack(factors) if plan.stacked else factors[0]
