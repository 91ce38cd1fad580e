"""Linears with group-wise int4 weights by the C kernels, which read them as they are stored."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.native.library import kernels
from stoker.kernels.native.linear import grouped_product, int4_weight
from stoker.kernels.quantized import Int4Weight, RowWeight
from stoker.kernels.reference import quant_int4 as reference
from stoker.kernels.types import PLAIN, Fusion


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.int4_linear`."""
    native = int4_weight(weight.codes, weight.scale, weight.zero, weight.offset, weight.group_size)
    y = grouped_product(x, native, bias, fusion)
    return reference.int4_linear(x, weight, bias, fusion) if y is None else y


def int4_row_weight(weight: Int4Weight, bias: Tensor | None) -> RowWeight:
    """See `ops.int4_row_weight`: the weight as it is stored, with scales and zeros [n, groups]."""
    zero, kind = (weight.offset, "float") if weight.offset is not None else (weight.zero, "none" if weight.zero is None else "int")
    return RowWeight("int4", weight.codes, weight.scale, bias, zero, kind, weight.group_size)


def pack_int4(weight: Int4Weight) -> Int4Weight:
    """See `ops.pack_int4`. Unchanged when the C kernel supports it: PyTorch's packed format would take as much memory again."""
    return reference.pack_int4(weight) if isinstance(kernels(), str) or weight.group_size % 32 else weight
