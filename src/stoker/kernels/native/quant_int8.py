"""Weight-only int8 linears by the C kernels, with a scale per row or per group."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from stoker.kernels.native.linear import grouped_int8_weight, grouped_product, int8_weight, product
from stoker.kernels.quantized import GroupedInt8Weight
from stoker.kernels.reference import quant_int8 as reference
from stoker.kernels.reference.quant_int8 import exact_integers, int8_embedding, w8a8_linear
from stoker.kernels.types import PLAIN, Fusion

__all__ = ["grouped_int8_linear", "int8_embedding", "int8_linear", "takes_groups", "w8a8_linear"]


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.int8_linear`."""
    native = int8_weight(weight, scale) if x.shape[0] <= max_rows() else None
    y = product(x, native, bias, fusion) if native is not None else None
    return reference.int8_linear(x, weight, scale, bias, fusion) if y is None else y


def takes_groups(weight: GroupedInt8Weight) -> bool:
    """See `ops.takes_int8_groups`."""
    return grouped_int8_weight(weight.codes, weight.scale, weight.offset, weight.group_size) is not None


def grouped_int8_linear(x: Tensor, weight: GroupedInt8Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.grouped_int8_linear`."""
    native = grouped_int8_weight(weight.codes, weight.scale, weight.offset, weight.group_size)
    y = grouped_product(x, native, bias, fusion)
    return reference.grouped_int8_linear(x, weight, bias, fusion) if y is None else y


@cache
def max_rows() -> int:
    """The number of rows up to which the kernel is faster than the reference: with a weight [3072, 576], 8 rows take the kernel 650 µs, and
    exact integer products of two digits 490 µs."""
    return 4 if exact_integers() else 16
