"""Linears with int4 groupwise weights in C, which reads them as they are stored."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.native.library import kernels
from stoker.kernels.native.linear import grouped_product, int4_weight
from stoker.kernels.quantized import Int4Weight, RowWeight
from stoker.kernels.reference import quant_int4 as reference
from stoker.kernels.types import PLAIN, Fusion


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    stored = int4_weight(weight.codes, weight.scale, weight.zero, weight.offset, weight.group_size)
    y = grouped_product(x, stored, bias, fusion)
    return reference.int4_linear(x, weight, bias, fusion) if y is None else y


def int4_row_weight(weight: Int4Weight, bias: Tensor | None) -> RowWeight:
    """As it is stored: scales and zeros [n, groups]."""
    zero, kind = (weight.offset, "float") if weight.offset is not None else (weight.zero, "none" if weight.zero is None else "int")
    return RowWeight("int4", weight.codes, weight.scale, bias, zero, kind, weight.group_size)


def pack_int4(weight: Int4Weight) -> Int4Weight:
    """As it is where the kernel takes it: what PyTorch's kernel reads would be as many bytes again."""
    return reference.pack_int4(weight) if isinstance(kernels(), str) or weight.group_size % 32 else weight
