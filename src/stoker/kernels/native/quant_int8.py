"""Weight-only int8 linears by the C kernels, with a scale per row or per group."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.blocks import in_blocks
from stoker.kernels.native.linear import grouped_int8_weight, grouped_product, int8_weight, product, widened_rows
from stoker.kernels.reference import quant_int8 as reference
from stoker.kernels.reference.quant_int8 import has_integer_products
from stoker.kernels.types import PLAIN, Fusion


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """A weight with groups in blocks, others unchanged (`ops.prepare_weight`)."""
    return in_blocks(weight, grouped_int8_weight(weight)) if weight.group_size else weight


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an int8 weight (`ops.packed_linear`) by the C kernels, or by the reference, also for int8 activations."""
    y = None
    if weight.group_size:
        y = grouped_product(x, grouped_int8_weight(weight), weight.bias, fusion)
    elif weight.activations == "none" and x.shape[0] <= max_rows() and (native := int8_weight(weight)) is not None:
        y = product(x, native, weight.bias, fusion)
    return reference.packed_linear(x, weight, fusion) if y is None else y


def packed_embedding(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of an int8 embedding table (`ops.packed_embedding`), of one with groups by the C kernel."""
    rows = widened_rows(grouped_int8_weight(weight), token_ids) if weight.group_size else None
    if rows is None and weight.layout == "blocks":
        raise IndexError(f"a token id is not in 0 to {weight.out_features - 1}")
    return reference.packed_embedding(token_ids, weight, dtype) if rows is None else rows.to(dtype)


def supports_groups(weight: PackedWeight) -> bool:
    """Whether the kernels read this int8 weight in groups as it is stored (`ops.supports_int8_groups`)."""
    return grouped_int8_weight(weight) is not None


@cache
def max_rows() -> int:
    """The largest number of rows for which the kernel is faster than the reference.

    With a weight [3072, 576], 8 rows need 650 µs in the kernel, and 490 µs as exact integer products of two digits.
    """
    return 4 if has_integer_products() else 16
