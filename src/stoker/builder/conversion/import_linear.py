"""Imports a linear from the pre-quantized weights of its parts (q, k and v; gate and up; experts).

Stored tensors follow the output rows, so the parts of a fused linear are concatenated without a change of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import CheckpointWeights
from stoker.builder.conversion.tensor_plan import TensorPlan
from stoker.core.specs import LinearSpec
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8

# Tensors of which the parts of a fused linear have one in common, since they have the same input. The largest value is used for all.
_SHARED_SUFFIXES = ("input_scale",)
_PER_GROUP_SUFFIXES = ("scale", "zero", "offset")


def import_format(spec: LinearSpec, plans: Mapping[str, TensorPlan], weights: CheckpointWeights) -> Format | None:
    """The format in which the checkpoint stores all parts of `spec`. None if they are plain numbers or have different formats."""
    plan = plans[f"{spec.name}.weight"]
    if plan.transformed is not None:
        return None
    sources = [source for group in plan.sources for source in group]
    formats = {weights.prequantized.get(source) for source in sources}
    found = formats.pop() if len(formats) == 1 else None
    if spec.name == "embed" and not isinstance(found, (Int8, GroupedInt8)):
        return None  # only these formats have a row lookup
    if isinstance(found, BlockFp8):
        # A block must not span two parts. Blocks of fewer rows repeat the scale of the block they are cut from.
        found = msgspec.structs.replace(found, rows=math.gcd(found.rows, *(weights.tensors[s].shape[0] for s in sources)))
    return found


def import_linear(spec: LinearSpec, chosen: Format, plans: Mapping[str, TensorPlan], weights: CheckpointWeights) -> dict[str, Tensor]:
    """The stored tensors of `spec` by suffix, imported without changing a value.

    `chosen` is the format of its parts in the checkpoint, or the same format with smaller groups or blocks.
    """
    plan, experts = plans[f"{spec.name}.weight"], []
    for sources in plan.sources:
        parts = [_split_scales(weights.read_prequantized(s), weights.prequantized[s], chosen, weights.tensors[s].shape) for s in sources]
        experts.append({suffix: _fuse(suffix, [part[suffix] for part in parts], spec) for suffix in parts[0]})
    if not plan.stacked:
        return experts[0]
    stacked = {suffix: torch.stack([expert[suffix] for expert in experts]) for suffix in experts[0]}
    return {suffix: tensor.amax(0) if suffix in _SHARED_SUFFIXES else tensor for suffix, tensor in stacked.items()}


def _fuse(suffix: str, parts: list[Tensor], spec: LinearSpec) -> Tensor:
    """One stored tensor of a fused linear from the tensors of its parts. Raises CheckpointError for parts that cannot be fused."""
    if suffix in _SHARED_SUFFIXES:
        return torch.stack(parts).amax(0)
    if suffix != "order":
        return torch.cat(parts).contiguous()
    if any(not torch.equal(parts[0], part) for part in parts):
        raise CheckpointError(
            f"{spec.name}: its parts order their input features differently (desc_act).", cure="Build with --quantize NO_QUANT."
        )
    return parts[0]


def _split_scales(tensors: dict[str, Tensor], stored: Format, chosen: Format, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors with scales repeated, so that each group or block of `chosen`, which divides those of `stored`, has its own scale."""
    if stored == chosen:
        return tensors
    row_repeats = column_repeats = columns = 1
    if isinstance(stored, BlockFp8) and isinstance(chosen, BlockFp8):
        row_repeats, column_repeats = stored.rows // chosen.rows, stored.columns // chosen.columns
        columns, num_rows = chosen.columns, -(-shape[0] // chosen.rows)
    elif isinstance(stored, (Int4, GroupedInt8)) and isinstance(chosen, (Int4, GroupedInt8)):
        column_repeats = stored.group_size // chosen.group_size
        columns, num_rows = chosen.group_size, shape[0]
    else:
        return tensors
    num_columns = -(-shape[1] // columns)

    def repeat(t: Tensor) -> Tensor:
        """A tensor of scales with repeated rows and columns, cut to its new shape."""
        return t.repeat_interleave(row_repeats, 0)[:num_rows].repeat_interleave(column_repeats, 1)[:, :num_columns].contiguous()

    return {suffix: repeat(tensor) if suffix in _PER_GROUP_SUFFIXES else tensor for suffix, tensor in tensors.items()}
