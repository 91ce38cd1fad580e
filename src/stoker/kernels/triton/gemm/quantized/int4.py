"""Linears of groupwise int4 weights on the GPU.

Stored codes pair neighbouring features in a byte. Here a byte pairs feature i of a group with feature i of the next group, so that the
low nibbles of a tile are one group and the high ones the next: a tile unpacks with a mask and a shift, without moving anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.quantized import Int4Weight, RowWeight
from stoker.kernels.reference import quant_int4 as reference
from stoker.kernels.triton.gemm.quantized.launch import Stored, few_rows, many_rows, plain_rows, ungated
from stoker.kernels.triton.gemm.quantized.tiles import FEW_ROWS, SMALLEST_INTEGER_GROUP, digits_pay
from stoker.kernels.triton.gemm.skinny.launch import skinny_linear, supports_skinny
from stoker.kernels.triton.gemm.skinny_int4.launch import skinny_int4_linear, supports_skinny_int4
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.ptx.unpack import unpack_int4
from stoker.kernels.types import PLAIN, Fusion

LARGEST_GROUP = 128  # larger ones, and such as 48, are cut into some that share a scale
SMALLEST_GROUP = 16  # the depth of a 16-bit matrix instruction
MIN_FUSED_LAYER_GROUP = 32  # the smallest that the fused layer kernel takes: of the bytes that a lane has of a block


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight for the kernel. Groups count as whole, and as an even number: what pads them is multiplied by zeros."""

    codes: (
        Tensor  # uint8 [(experts,) N, groups × group / 2]: byte i of a pair of groups holds feature i of the first (low) and of the second
    )
    scale: Tensor  # as stored, [(experts,) groups, N]
    zero: Tensor | None  # uint8 zero points or float offsets, as scale
    zero_kind: str  # none, int, float
    group: int

    def stored(self) -> Stored:
        n, half = self.codes.shape[-2:]
        return Stored("int4", self.codes, self.scale, n, 2 * half, self.zero, self.zero_kind, self.group)


def pack_int4(weight: Int4Weight) -> Int4Weight:
    """See `ops.pack_int4`. The packed tensors take the place of the stored ones, so that these can be freed.

    Groups that no tile has nor shares (no multiple of 16: those that ranks cut) stay as stored.
    """
    if weight.group_size % SMALLEST_GROUP:
        return weight
    packed = pack(weight)
    kind = packed.zero_kind
    return Int4Weight(
        packed.codes, packed.scale, packed.zero if kind == "int" else None, packed.zero if kind == "float" else None, packed.group,
        packed,
    )  # fmt: skip


def pack(weight: Int4Weight) -> Packed:
    group = min(weight.group_size & -weight.group_size, LARGEST_GROUP)  # the largest power of two that divides it
    grid = [weight.scale, weight.zero if weight.offset is None else weight.offset]
    if weight.group_size > group:
        grid = [None if t is None else t.repeat_interleave(weight.group_size // group, dim=-1) for t in grid]
    pairs = triton.cdiv(weight.in_features, 2 * group)
    scale, zero = (None if t is None else F.pad(t, (0, 2 * pairs))[..., : 2 * pairs].transpose(-1, -2).contiguous() for t in grid)
    assert scale is not None
    kind = "float" if weight.offset is not None else "none" if weight.zero is None else "int"
    return Packed(_paired(weight.codes, pairs, group), scale, zero, kind, group)


def _paired(codes: Tensor, pairs: int, group: int) -> Tensor:
    """`Packed.codes` of codes as stored; experts one after another, since four bytes a code pass by."""
    if codes.dim() == 3:
        made = codes.new_empty(*codes.shape[:2], pairs * group)
        for expert, target in zip(codes, made, strict=True):
            target.copy_(_paired(expert, pairs, group))
        return made
    each = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    each = F.pad(each, (0, pairs * 2 * group - each.shape[1])).unflatten(-1, (pairs, 2, group))
    return (each[:, :, 0] | (each[:, :, 1] << 4)).flatten(1).contiguous()


def int4_row_weight(weight: Int4Weight, bias: Tensor | None) -> RowWeight | None:
    """See `ops.int4_row_weight`: groups of 32 to 128, and of more, which were cut."""
    packed: Packed | None = weight.packed
    if packed is None or packed.group < MIN_FUSED_LAYER_GROUP:
        return None
    return RowWeight("int4", packed.codes, packed.scale, bias, packed.zero, packed.zero_kind, packed.group)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.int4_linear`. Few rows become two int8 digits each, which multiply codes that no one widens; more meet widened codes: in
    registers (bands, tiles), and many of them in memory.

    A weight that `pack_int4` left as stored is widened in plain torch, every time.
    """
    packed: Packed | None = weight.packed
    if packed is None:
        return reference.int4_linear(x, weight, bias, fusion)
    rows, stored = x.shape[0], packed.stored()
    if supports_skinny(x, "int4", stored):
        return skinny_linear(x, "int4", stored, None, bias, fusion)
    if supports_skinny_int4(x, stored):
        return skinny_int4_linear(x, stored, bias, fusion)
    if rows <= FEW_ROWS:
        if digits_pay(rows, packed.group) or (x.dtype == torch.float32 and packed.group >= SMALLEST_INTEGER_GROUP):
            return few_rows(x, stored, "digits", f"int4/{packed.group}", None, bias, fusion)
        return plain_rows(x, stored, bias, fusion)
    x, fusion = ungated(x, fusion)
    return many_rows(x, stored.n, lambda a, b: dequantize_int4(packed, a, b, x.shape[1], x.dtype), bias, fusion)


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


def dequantize_int4(packed: Packed, first: int, last: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows first : last of the real weight."""
    n, half = packed.codes.shape
    out = torch.empty((last - first, in_features), dtype=dtype, device=packed.codes.device)
    dequantize_kernel[(triton.cdiv(last - first, 16), half // packed.group)](
        packed.codes, packed.scale, packed.zero, out, first, last, n, in_features, half,
        ZERO=packed.zero_kind, GROUP=packed.group, BLOCK_N=16, PACKED=not out.is_cpu, num_warps=4, **pdl_launch_options(out),
    )  # fmt: skip
    return out
