"""Linears of int4 weights in groups on the GPU.

A stored byte holds two neighbouring features. `prepare_weight` rearranges the bytes once, at load (layout `paired` of `PackedWeight`): a
byte holds feature i of a group in its low nibble, and feature i of the next group in its high nibble. A tile of bytes then unpacks to one
tile of each group with a mask and a shift, without moving values between threads. With groups of G features:

    byte of a row    | 0        1            ...  G - 1      | G            ...  2G - 1     | ...
    low nibble       | f 0      f 1               f G - 1    | f 2G              f 3G - 1   |        even groups
    high nibble      | f G      f G + 1           f 2G - 1   | f 3G              f 4G - 1   |        odd groups

    scale, zero [groups, n]: transposed, so that the rows of a tile read neighbouring elements. The number of groups is even; the features
    that fill the last groups up are multiplied by zeros.

`dequantize_kernel`: the real values of some rows, for the library's GEMM. Grid: blocks of BLOCK_N rows × pairs of groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import quant_int4 as reference
from stoker.kernels.triton.gemm.quantized.fp4 import in_quads
from stoker.kernels.triton.gemm.quantized.launch import (
    apply_input_gate,
    dequantized_linear,
    plain_activation_linear,
    quantized_activation_linear,
)
from stoker.kernels.triton.gemm.quantized.tiles import MAX_SKINNY_ROWS, MIN_INT8_GROUP, digits_are_faster
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.gemm.skinny_int4.launch import skinny_int4_linear, supports_skinny_int4
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.ptx.unpack import unpack_fp4, unpack_int4
from stoker.kernels.types import PLAIN, Fusion

MAX_GROUP = 128  # larger groups, and sizes such as 48, are split into power-of-2 groups with the same scale
MIN_GROUP = 16  # the depth of a 16-bit matrix instruction


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """The weight in the layout `paired` (`ops.prepare_weight`), FP4 experts in `quads` where these can be (`fp4.in_quads`).

    The result does not refer to the given tensors, so that these can be freed. A weight whose group size is no multiple of MIN_GROUP, such
    as groups that a shard boundary splits, is returned unchanged: no tile supports it.
    """
    if weight.group_size % MIN_GROUP:
        return weight
    if weight.is_fp4 and weight.num_experts and (quads := in_quads(weight)) is not None:
        return quads
    group = min(weight.group_size & -weight.group_size, MAX_GROUP)  # the largest power of two that divides it
    tensors = [weight.scale, weight.zero]
    if weight.group_size > group:
        tensors = [None if t is None else t.repeat_interleave(weight.group_size // group, dim=-1) for t in tensors]
    pairs = cdiv(weight.in_features, 2 * group)
    scale, zero = (None if t is None else F.pad(t, (0, 2 * pairs))[..., : 2 * pairs].transpose(-1, -2).contiguous() for t in tensors)
    return replace(weight, values=_pair_groups(weight.values, pairs, group), scale=scale, zero=zero, group_size=group, layout="paired")


def _pair_groups(values: Tensor, pairs: int, group: int) -> Tensor:
    """`values` converted from the layout `stored` to the layout `paired` with `pairs` pairs of groups per row.

    Experts are converted one after another, because temporary tensors are larger than the weight.
    """
    if values.is_meta:  # no content: hundreds of experts of each layer would take most of the time of an ahead-of-time trace
        return values.new_empty(*values.shape[:-1], pairs * group)
    if values.dim() == 3:
        paired = values.new_empty(*values.shape[:2], pairs * group)
        for expert, target in zip(values, paired, strict=True):
            target.copy_(_pair_groups(expert, pairs, group))
        return paired
    unpacked = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    unpacked = F.pad(unpacked, (0, pairs * 2 * group - unpacked.shape[1])).unflatten(-1, (pairs, 2, group))
    return (unpacked[:, :, 0] | (unpacked[:, :, 1] << 4)).flatten(1).contiguous()


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an int4 weight (`ops.packed_linear`). The method depends on the number of rows, from low to high:

    digits against the stored integers (`gemm.skinny`, `quantized_activation_linear`), weights dequantized in registers (`gemm.skinny_int4`,
    `plain_activation_linear`), weights dequantized in memory (`dequantized_linear`). Digits are integers, so FP4 values are dequantized.
    A weight that `prepare_weight` left unchanged is dequantized by the reference in every call.
    """
    if weight.layout == "stored":
        return reference.packed_linear(x, weight, fusion)
    rows, group = x.shape[0], weight.group_size
    if supports_skinny(x, weight):
        return skinny_linear(x, weight, fusion)
    if supports_skinny_int4(x, weight):
        return skinny_int4_linear(x, weight, fusion)
    if rows <= MAX_SKINNY_ROWS:
        by_digits = digits_are_faster(rows, group) or (x.dtype == torch.float32 and group >= MIN_INT8_GROUP)
        if by_digits and not weight.is_fp4:
            return quantized_activation_linear(x, weight, "digits", f"int4/{group}", fusion)
        return plain_activation_linear(x, weight, fusion)
    x, fusion = apply_input_gate(x, fusion)
    return dequantized_linear(x, weight, lambda a, b: dequantize_int4(weight, a, b, x.shape[1], x.dtype), fusion)


@triton.jit(do_not_specialize=["first", "last"])
def dequantize_kernel(
    # Pointers
    packed_ptr,  # uint8 [n, stride_packed]
    scale_ptr,  # [groups, n]
    zero_ptr,  # [groups, n] or None
    row_scale_ptr,  # float32 [n] or None
    out_ptr,  # [last - first, size]
    # Sizes
    first,  # rows first : last of the weight
    last,
    n,
    size,  # input features, without those that fill the last groups up
    stride_packed,
    # Constants
    ZERO: tl.constexpr,  # zero kind: see `group_scales`
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,  # True on a GPU: inline PTX; False in the interpreter: the equivalent Triton operations
    USE_PDL: tl.constexpr,
):
    """One CTA: dequantize BLOCK_N rows of one pair of groups.

    The rows first : last of the weight are written to out [last - first, size].
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    weight_row = tl.minimum(first + row, last - 1)
    byte = tl.arange(0, GROUP)[None, :]
    packed = tl.load(packed_ptr + weight_row.to(tl.int64)[:, None] * stride_packed + pair * GROUP + byte)
    if ZERO == "e2m1":
        low, high = unpack_fp4(packed, tl.float32, PACKED)  # [BLOCK_N, GROUP]
    else:
        low, high = unpack_int4(packed, PACKED)
    target_ptr = out_ptr + row.to(tl.int64)[:, None] * size + pair * (2 * GROUP) + byte
    inside = (first + row < last)[:, None]
    for half in tl.static_range(2):
        offset = (2 * pair + half) * n + weight_row
        scale = tl.load(scale_ptr + offset).to(tl.float32)
        value = (low if half == 0 else high).to(tl.float32)
        if ZERO == "none":
            value = (value - 8.0) * scale[:, None]
        elif ZERO == "e2m1":
            value *= scale[:, None]
            if row_scale_ptr is not None:
                value *= tl.load(row_scale_ptr + weight_row)[:, None]
        elif ZERO == "int":
            value = (value - tl.load(zero_ptr + offset).to(tl.float32)[:, None]) * scale[:, None]
        else:
            value = value * scale[:, None] + tl.load(zero_ptr + offset).to(tl.float32)[:, None]
        mask = inside & (pair * (2 * GROUP) + half * GROUP + byte < size)
        tl.store(target_ptr + half * GROUP, value.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_int4(weight: PackedWeight, first: int, last: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows first : last of the weight, dequantized to `dtype`: [last - first, in_features]."""
    n, half = weight.values.shape
    out = torch.empty((last - first, in_features), dtype=dtype, device=weight.values.device)
    dequantize_kernel[(cdiv(last - first, 16), half // weight.group_size)](
        weight.values,
        weight.scale,
        weight.zero,
        weight.row_scale,
        out,
        first,
        last,
        n,
        in_features,
        half,
        ZERO=weight.zero_kind,
        GROUP=weight.group_size,
        BLOCK_N=16,
        PACKED=not out.is_cpu,
        num_warps=4,
        **pdl_launch_options(out),
    )
    return out
