"""Linears of groupwise int4 weights on the GPU.

Stored codes pair neighbouring features in a byte. Here a byte pairs feature i of a group with feature i of the next group, so that the
low nibbles of a tile are one group and the high ones the next: a tile unpacks with a mask and a shift, without moving anything.
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
from stoker.kernels.triton.gemm.quantized.launch import few_rows, many_rows, plain_rows, ungated
from stoker.kernels.triton.gemm.quantized.tiles import FEW_ROWS, SMALLEST_INTEGER_GROUP, digits_pay
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.gemm.skinny_int4.launch import skinny_int4_linear, supports_skinny_int4
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.ptx.unpack import unpack_int4
from stoker.kernels.types import PLAIN, Fusion

LARGEST_GROUP = 128  # larger ones, and such as 48, are cut into some that share a scale
SMALLEST_GROUP = 16  # the depth of a 16-bit matrix instruction


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """See `ops.prepare_weight`. The layout `paired` takes the place of the stored one, so that this can be freed.

    Groups count as whole, and as an even number: what pads them is multiplied by zeros. Groups that no tile has nor shares (no multiple of
    16: those that ranks cut) stay as stored.
    """
    if weight.group_size % SMALLEST_GROUP:
        return weight
    group = min(weight.group_size & -weight.group_size, LARGEST_GROUP)  # the largest power of two that divides it
    grid = [weight.scale, weight.zero]
    if weight.group_size > group:
        grid = [None if t is None else t.repeat_interleave(weight.group_size // group, dim=-1) for t in grid]
    pairs = triton.cdiv(weight.in_features, 2 * group)
    scale, zero = (None if t is None else F.pad(t, (0, 2 * pairs))[..., : 2 * pairs].transpose(-1, -2).contiguous() for t in grid)
    return replace(weight, values=_paired(weight.values, pairs, group), scale=scale, zero=zero, group_size=group, layout="paired")


def _paired(values: Tensor, pairs: int, group: int) -> Tensor:
    """Stored values in the layout `paired`; experts one after another, because unpacked values need four bytes each."""
    if values.dim() == 3:
        made = values.new_empty(*values.shape[:2], pairs * group)
        for expert, target in zip(values, made, strict=True):
            target.copy_(_paired(expert, pairs, group))
        return made
    each = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    each = F.pad(each, (0, pairs * 2 * group - each.shape[1])).unflatten(-1, (pairs, 2, group))
    return (each[:, :, 0] | (each[:, :, 1] << 4)).flatten(1).contiguous()


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.packed_linear`. Few rows become two int8 digits each, which multiply values that no one widens; more meet widened values: in
    registers (bands, tiles), and many of them in memory.

    A weight that `prepare_weight` left as stored is widened in plain torch, every time.
    """
    if weight.layout == "stored":
        return reference.packed_linear(x, weight, fusion)
    rows, group = x.shape[0], weight.group_size
    if supports_skinny(x, weight):
        return skinny_linear(x, weight, fusion)
    if supports_skinny_int4(x, weight):
        return skinny_int4_linear(x, weight, fusion)
    if rows <= FEW_ROWS:
        if digits_pay(rows, group) or (x.dtype == torch.float32 and group >= SMALLEST_INTEGER_GROUP):
            return few_rows(x, weight, "digits", f"int4/{group}", fusion)
        return plain_rows(x, weight, fusion)
    x, fusion = ungated(x, fusion)
    return many_rows(x, weight, lambda a, b: dequantize_int4(weight, a, b, x.shape[1], x.dtype), fusion)


@triton.jit(do_not_specialize=["first", "last"])
def dequantize_kernel(
    codes, scale, zero, out, first, last, n, size, stride_codes, ZERO: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: a pair of groups of BLOCK_N rows from `first` on, into out [.., size]."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    source = tl.minimum(first + row, last - 1)
    col = tl.arange(0, GROUP)[None, :]
    low, high = unpack_int4(tl.load(codes + source.to(tl.int64)[:, None] * stride_codes + pair * GROUP + col), PACKED)
    target = out + row.to(tl.int64)[:, None] * size + pair * (2 * GROUP) + col
    inside = (first + row < last)[:, None]
    for half in tl.static_range(2):
        place = (2 * pair + half) * n + source
        s = tl.load(scale + place).to(tl.float32)
        value = (low if half == 0 else high).to(tl.float32)
        if ZERO == "none":
            value = (value - 8.0) * s[:, None]
        elif ZERO == "int":
            value = (value - tl.load(zero + place).to(tl.float32)[:, None]) * s[:, None]
        else:
            value = value * s[:, None] + tl.load(zero + place).to(tl.float32)[:, None]
        keep = inside & (pair * (2 * GROUP) + half * GROUP + col < size)
        tl.store(target + half * GROUP, value.to(out.dtype.element_ty), mask=keep)


def dequantize_int4(weight: PackedWeight, first: int, last: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows first : last of the real weight."""
    n, half = weight.values.shape
    out = torch.empty((last - first, in_features), dtype=dtype, device=weight.values.device)
    dequantize_kernel[(triton.cdiv(last - first, 16), half // weight.group_size)](
        weight.values, weight.scale, weight.zero, out, first, last, n, in_features, half,
        ZERO=weight.zero_kind, GROUP=weight.group_size, BLOCK_N=16, PACKED=not out.is_cpu, num_warps=4, **pdl_launch_options(out),
    )  # fmt: skip
    return out
