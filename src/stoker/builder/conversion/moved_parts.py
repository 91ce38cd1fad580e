"""Moves rows or columns of a quantized weight as an architecture does those of a plain one, without a change of the stored bits."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.builder.checkpoint.weights import CheckpointWeights
from stoker.builder.conversion.tensor_plan import TensorPlan
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.quant.format import Format


def moved_indices(
    spec: LinearSpec, chosen: Format, plan: TensorPlan, weights: CheckpointWeights, model: ModelConfig
) -> dict[str, tuple[int, Tensor]] | None:
    """By suffix of the stored tensors that change: (axis, int64 index into the concatenated sources) for `index_select`.

    None if `plan.transformed` computes values, or separates a block or group of `chosen`.
    """
    assert plan.transformed is not None
    if plan.transformed.moves is None or plan.stacked or (plan.transformed.moves == "columns" and getattr(chosen, "reorder", False)):
        return None
    by_rows = plan.transformed.moves in ("rows", "expert_rows")
    index = _source_indices(plan, weights, model)
    moved: dict[str, tuple[int, Tensor]] = {}
    for suffix, layout in chosen.layout(spec, torch.float32).items():
        axis, unit = (layout.row_axis, layout.row_unit) if by_rows else (layout.col_axis, layout.col_unit)
        if axis is None:
            continue
        if (units := _whole_units(index, unit)) is None:
            return None
        moved[suffix] = axis, units
    return moved


def _source_indices(plan: TensorPlan, weights: CheckpointWeights, model: ModelConfig) -> Tensor:
    """int64: the row or column of the concatenated sources that is each row or column of the engine's weight."""
    assert plan.transformed is not None
    shapes = [weights.tensors[source].shape for source in plan.sources[0]]
    if plan.transformed.moves == "columns":
        return plan.transformed.transform([torch.arange(shapes[0][1])[None]], model)[0]
    if plan.transformed.moves == "expert_rows":
        return plan.transformed.transform([torch.arange(shapes[0][2])[None, None]], model)[0, :, 0]
    rows = [shape[0] for shape in shapes]
    return plan.transformed.transform([*torch.arange(sum(rows))[:, None].split(rows)], model)[:, 0]


def _whole_units(index: Tensor, unit: int) -> Tensor | None:
    """The index of each `unit` neighbours, of which the last may be fewer. None if the units of the source do not stay together."""
    starts = index[::unit]
    together = (starts[:, None] + torch.arange(unit)).flatten()[: len(index)]
    return starts // unit if bool((starts % unit == 0).all()) and torch.equal(index, together) else None
