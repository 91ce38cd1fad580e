"""Linears with int4 groupwise weights in C, which reads them as they are stored."""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.native.library import kernels
from stoker.kernels.native.linear import int4_product
from stoker.kernels.quantized import Int4Weight
from stoker.kernels.reference import quant_int4 as reference
from stoker.kernels.reference.quant_int4 import int4_row_weight
from stoker.kernels.types import PLAIN, Fusion

__all__ = ["int4_linear", "int4_row_weight", "pack_int4"]

_FEW_ROWS = 64  # beyond them a widened weight's product is as fast


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    y = int4_product(x, weight, bias, fusion) if x.shape[0] <= _FEW_ROWS else None
    return reference.int4_linear(x, weight, bias, fusion) if y is None else y


def pack_int4(weight: Int4Weight) -> Int4Weight:
    """As it is where the kernel takes it: what PyTorch's kernel reads would be as many bytes again."""
    return reference.pack_int4(weight) if isinstance(kernels(), str) or weight.group_size % 32 else weight
