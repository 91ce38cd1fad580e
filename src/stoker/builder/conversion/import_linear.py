"""Imports a linear from the pre-quantized weights of its parts (q, k and v; gate and up; experts).

Stored tensors follow the output rows, so the parts of a fused linear are concatenated without a change of values. Where an architecture
moves rows or columns, those of the stored tensors are moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.weights import CheckpointWeights
from stoker.builder.conversion.input_factors import can_scale_rows, folds_of, has_input_factors, linear_of
from stoker.builder.conversion.moved_parts import moved_indices
from stoker.builder.conversion.tensor_plan import TensorPlan
from stoker.core.model_config import ModelConfig
from stoker.core.specs import LinearSpec
from stoker.kernels.reference.quant_int4 import fp4_as_int8, unpack
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8

# Tensors of which the parts of a fused linear have one in common, since they have the same input. The largest value is used for all.
SHARED_SUFFIXES = ("input_scale",)
LAYER_INPUTS = "layer_inputs.embed"  # a table of Gemma 3n, which has a third of the weights and whose rows are looked up
_PER_GROUP_SUFFIXES = ("scale", "zero", "offset")


def import_format(spec: LinearSpec, plans: Mapping[str, TensorPlan], weights: CheckpointWeights, model: ModelConfig) -> Format | None:
    """The format that can store all parts of `spec` as the checkpoint has them. None if a part consists of plain numbers.

    Parts in different kinds of groups, such as q in Q4_K and v in Q6_K, have int8 in groups in common. Rows and columns that the
    architecture moves must be whole blocks and groups.
    """
    plan = plans[f"{spec.name}.weight"]
    found = _common_format(spec, plan, weights)
    if has_input_factors(spec.name, plans, weights) and not _can_fold(spec, plans, weights, model):
        return None
    if found is None or plan.transformed is None:
        return found
    return found if moved_indices(spec, found, plan, weights, model) is not None else None


def _can_fold(spec: LinearSpec, plans: Mapping[str, TensorPlan], weights: CheckpointWeights, model: ModelConfig) -> bool:
    """Whether the factors of the input of `spec` can be folded into the linear before it."""
    fold = next((fold for fold in folds_of(spec.name, model) if fold.consumers == (spec.name,)), None)
    if fold is None or (fold.linear.endswith(".qkv") and weights.has_cache_scales):  # scales of values are those without factors
        return False
    before = linear_of(fold.linear, model)
    found = import_format(before, plans, weights, model)
    return found is not None and can_scale_rows(found, before)


def _common_format(spec: LinearSpec, plan: TensorPlan, weights: CheckpointWeights) -> Format | None:
    """The format that can store all sources of a weight, without regard to their arrangement."""
    sources = [source for group in plan.sources for source in group]
    formats = {weights.prequantized.get(source) for source in sources}
    found = formats.pop() if len(formats) == 1 else _common_groups(formats)
    if spec.name == "embed" and not isinstance(found, (Int8, GroupedInt8)):
        return _common_groups({found}) if isinstance(found, Fp4) else None  # only these formats have a row lookup
    if spec.name == LAYER_INPUTS and not isinstance(found, (Int8, GroupedInt8)):
        return _common_groups({found})
    if isinstance(found, BlockFp8):
        # A block must not span two parts. Blocks of fewer rows repeat the scale of the block they are cut from.
        found = msgspec.structs.replace(found, rows=math.gcd(found.rows, *(weights.tensors[s].shape[0] for s in sources)))
    return found


def is_widened(spec: LinearSpec, found: Format | None, plans: Mapping[str, TensorPlan], weights: CheckpointWeights) -> bool:
    """Whether the checkpoint stores a part of `spec` in fewer bits than `found`, the result of `import_format`, stores all parts."""
    stored = {weights.prequantized.get(source) for group in plans[f"{spec.name}.weight"].sources for source in group}
    return stored != {None} and (len(stored) > 1 or found is None or (spec.name == LAYER_INPUTS and stored != {found}))


def _common_groups(formats: set[Format | None]) -> GroupedInt8 | None:
    """The format of int8 in groups that can store the values of all `formats` unchanged; None if there is no such format."""
    groups = [found for found in formats if isinstance(found, (GroupedInt8, Fp4)) or (isinstance(found, Int4) and _is_wideable(found))]
    if len(groups) < len(formats):
        return None
    shifted = any(
        found.shifted if isinstance(found, GroupedInt8) else isinstance(found, Int4) and found.zero == "float" for found in groups
    )
    return GroupedInt8(group_size=min(found.group_size for found in groups), shifted=shifted)


def _is_wideable(found: Int4) -> bool:
    """Whether int8 in groups can store the values of this format with the same rounding of each real value."""
    return found.zero in ("none", "float") and not found.reorder


def import_linear(
    spec: LinearSpec, chosen: Format, plans: Mapping[str, TensorPlan], weights: CheckpointWeights, model: ModelConfig
) -> dict[str, Tensor]:
    """The stored tensors of `spec` by suffix, imported without changing a value.

    `chosen` is the format of its parts in the checkpoint, or the same format with smaller groups or blocks.
    """
    plan, experts = plans[f"{spec.name}.weight"], []
    for sources in plan.sources:
        parts = [_split_scales(weights.read_prequantized(s), weights.prequantized[s], chosen, weights.tensors[s].shape) for s in sources]
        experts.append({suffix: _fuse(suffix, [part[suffix] for part in parts], spec) for suffix in parts[0]})
    if plan.transformed is not None:
        moved = moved_indices(spec, chosen, plan, weights, model)
        assert moved is not None, f"{spec.name} is imported as {chosen}, which `import_format` does not choose"
        return {suffix: tensor.index_select(*moved[suffix]) if suffix in moved else tensor for suffix, tensor in experts[0].items()}
    if not plan.stacked:
        return experts[0]
    stacked = {suffix: torch.stack([expert[suffix] for expert in experts]) for suffix in experts[0]}
    return {suffix: tensor.amax(0) if suffix in SHARED_SUFFIXES else tensor for suffix, tensor in stacked.items()}


def _fuse(suffix: str, parts: list[Tensor], spec: LinearSpec) -> Tensor:
    """One stored tensor of a fused linear from the tensors of its parts. Raises CheckpointError for parts that cannot be fused."""
    if suffix in SHARED_SUFFIXES:
        return torch.stack(parts).amax(0)
    if len(parts) == 1:
        return parts[0]  # without the copy that torch.cat makes
    if suffix != "order":
        return torch.cat(parts)
    if any(not torch.equal(parts[0], part) for part in parts):
        raise CheckpointError(
            f"{spec.name}: its parts order their input features differently (desc_act).", cure="Build with --quantize NO_QUANT."
        )
    return parts[0]


def _split_scales(tensors: dict[str, Tensor], stored: Format, chosen: Format, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors with scales repeated, so that each group or block of `chosen`, which divides those of `stored`, has its own scale."""
    if stored == chosen:
        return tensors
    if isinstance(chosen, GroupedInt8) and isinstance(stored, (Int4, GroupedInt8, Fp4)):
        tensors, stored = _widened(tensors, stored, chosen)
    row_repeats = column_repeats = columns = 1
    if isinstance(stored, BlockFp8) and isinstance(chosen, BlockFp8):
        row_repeats, column_repeats = stored.rows // chosen.rows, stored.columns // chosen.columns
        columns, num_rows = chosen.columns, -(-shape[0] // chosen.rows)
    elif isinstance(stored, (Int4, GroupedInt8, Fp4)) and isinstance(chosen, (Int4, GroupedInt8, Fp4)):
        column_repeats = stored.group_size // chosen.group_size
        columns, num_rows = chosen.group_size, shape[0]
    else:
        return tensors
    num_columns = -(-shape[1] // columns)

    def repeat(t: Tensor) -> Tensor:
        """A tensor of scales with repeated rows and columns, cut to its new shape."""
        if column_repeats > 1:
            t = t.repeat_interleave(column_repeats, -1)[..., :num_columns]
        return (t if row_repeats == 1 else t.repeat_interleave(row_repeats, 0)[:num_rows]).contiguous()

    return {suffix: repeat(tensor) if suffix in _PER_GROUP_SUFFIXES else tensor for suffix, tensor in tensors.items()}


def _widened(tensors: dict[str, Tensor], stored: Int4 | GroupedInt8 | Fp4, chosen: GroupedInt8) -> tuple[dict[str, Tensor], GroupedInt8]:
    """The tensors of a weight as int8, with scales and offsets as `chosen` has them and the groups of `stored`, and their format."""
    if isinstance(stored, Fp4):
        widened_fp4 = fp4_as_int8(stored.pack(dict(tensors), None))
        assert widened_fp4.scale is not None
        tensors = {"weight": widened_fp4.values, "scale": widened_fp4.scale}
    weight = tensors["weight"]
    if isinstance(stored, Int4):
        weight = unpack(weight).to(torch.int8)
        weight = weight - 8 if stored.zero == "none" else weight
    dtype = getattr(torch, chosen.scale_dtype)
    widened = {"weight": weight, "scale": tensors["scale"].to(dtype)}
    if chosen.shifted:
        widened["offset"] = tensors["offset"].to(dtype) if "offset" in tensors else torch.zeros_like(widened["scale"])
    return widened, msgspec.structs.replace(chosen, group_size=stored.group_size)
