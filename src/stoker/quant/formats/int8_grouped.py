"""Weight-only int8 in groups of input features, which holds GGUF's Q8_0, Q6_K and Q5 blocks without a further loss."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from stoker.base.config import check_choice
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.kernels.reference.quant_int8 import widen_groups
from stoker.quant import groups
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.formats.int8 import INT8_UNIT
from stoker.quant.groups import SCALE_DTYPES

GROUP_SIZES = (16, 32, 64, 128, 256)


class GroupedInt8(Format, frozen=True, kw_only=True, tag="int8_grouped"):
    """`weight` int8 [(experts,) out, in], `scale` [(experts,) out, groups], and with `shifted` `offset` of the same shape.

    real = weight × scale + offset. With `reorder`, `order` int32 [(experts,) in] is the input feature that each column multiplies (GPTQ
    checkpoints with act_order). Experts on a GPU, and linears on a CPU with a C compiler, are read as stored. Otherwise the weight is
    widened to `dtype` at load, because no kernel reads int8 in groups: then only the file is small.
    """

    group_size: int = 32
    scale_dtype: str = "float32"
    shifted: bool = False
    reorder: bool = False
    dtype: str = "float32"  # that the model computes in

    def __post_init__(self) -> None:
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("scale_dtype", self.scale_dtype, SCALE_DTYPES)

    @property
    def rows_per_call(self) -> int | None:
        """The number of output rows that one call of `quantize` needs."""
        return None if self.reorder else 1  # all rows have one order

    def aligned_to(self, rows: int, columns: int) -> GroupedInt8:
        """This format with blocks or groups that divide `rows` and `columns`, where possible."""
        return msgspec.structs.replace(self, group_size=groups.largest_group_size(GROUP_SIZES, self.group_size, columns))

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires."""
        *experts, rows, size = spec.weight_shape
        axis = len(experts)
        scales = (*experts, rows, -(-size // self.group_size))
        scale = Layout(scales, getattr(torch, self.scale_dtype), row_axis=axis, col_axis=axis + 1, col_unit=self.group_size)
        stored = {"weight": Layout(spec.weight_shape, torch.int8, row_axis=axis, col_axis=axis + 1), "scale": scale}
        if self.shifted:
            stored["offset"] = scale
        return stored | {"order": Layout((*experts, size), torch.int32)} if self.reorder else stored

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires."""
        split, dtype = groups.split(weight, self.group_size), getattr(torch, self.scale_dtype)
        low, high = split.amin(-1, keepdim=True), split.amax(-1, keepdim=True)
        offset = ((low + high) / 2 if self.shifted else torch.zeros_like(low)).to(dtype)
        largest = (split - offset.float()).abs().amax(-1, keepdim=True)
        scale = (largest * INT8_UNIT).clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)
        values = ((split - offset.float()) / scale.float()).round().clamp(-127, 127).to(torch.int8)
        stored = {"weight": groups.join(values, weight.shape[-1]).contiguous(), "scale": scale.squeeze(-1)}
        return stored | {"offset": offset.squeeze(-1)} if self.shifted else stored

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        values, scale, offset = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("offset", None)
        grouped = PackedWeight("int8", values, scale, offset, self.group_size, bias=bias, column_order=tensors.pop("order", None))
        if ops.supports_int8_groups(grouped):
            return grouped
        wide = in_feature_order(widen_groups(grouped), grouped.column_order)
        return PackedWeight("dense", wide.to(getattr(torch, self.dtype)), bias=bias)


def in_feature_order(values: Tensor, column_order: Tensor | None) -> Tensor:
    """`values` [(experts,) out, in] with column i for input feature i; column_order[i] is the feature of column i, or None."""
    if column_order is None:
        return values
    index = column_order.long().unsqueeze(-2).expand(values.shape)
    return torch.empty_like(values).scatter_(-1, index, values)


FORMATS.add("int8_grouped", GroupedInt8)
