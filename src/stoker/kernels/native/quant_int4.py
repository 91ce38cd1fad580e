"""Linears with group-wise int4 weights by the C kernels, which read them in blocks or as they are stored."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.native.blocks import in_blocks
from stoker.kernels.native.library import kernels
from stoker.kernels.native.linear import grouped_int8_weight, grouped_product, int4_weight
from stoker.kernels.reference import quant_int4 as reference
from stoker.kernels.types import PLAIN, Fusion


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an int4 weight (`ops.packed_linear`) by the C kernel where it is supported, otherwise by the reference."""
    y = grouped_product(x, int4_weight(weight), weight.bias, fusion)
    return reference.packed_linear(x, weight, fusion) if y is None else y


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """Prepare a weight at load (`ops.prepare_weight`).

    In blocks, or unchanged, when the C kernel supports it, because PyTorch's packed copy would double it. FP4 in groups that it does not
    support, as those of 16 features, becomes int8 in groups; rows of more groups than its kernel supports are dequantized in every call.
    """
    if weight.is_fp4:
        if weight.scale is not None and weight.row_scale is not None:
            weight = replace(weight, scale=weight.scale.float() * weight.row_scale[:, None], row_scale=None)
        if (native := int4_weight(weight)) is not None:
            return in_blocks(weight, native)
        widened = reference.fp4_as_int8(weight)
        native = grouped_int8_weight(widened)
        return weight if native is None else in_blocks(widened, native)
    if isinstance(kernels(), str) or weight.group_size % 32:
        return reference.prepare_weight(weight)
    return in_blocks(weight, int4_weight(weight))
