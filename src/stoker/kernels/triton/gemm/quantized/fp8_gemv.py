"""One row against float8_e4m3fn weights: half-precision multiply-adds, two in an instruction.

A matrix instruction has no use for one row, and its codes would want a launch before this one. Here every program makes the codes that it
multiplies, as float16 with e4m3's values × 2^-8, and the weights become float16 two at a time. A lane adds up at most 2 × K ÷ 1,024
products of at most 448 × 1.75 in float16; the lanes are summed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.quantized.activations import FP8_LIMIT, row_step
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import Fusion

MAX_FEATURES = 4096  # rows of more are read too long for their largest; up to 8,192, 16 products a lane stay below float16's largest number
MANY_ROWS = 8192  # of a weight
_WORDS = 256  # of four weights, a tile's width

_CODES = tl.constexpr(
    "{ .reg .b16 p; .reg .b32 h, c; mov.b32 c, 0x1C001C00; cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; cvt.rn.f16x2.e4m3x2 h, p; "
    "mul.rn.f16x2 $0, h, c; }"
)
_MULTIPLY_ADD = tl.constexpr(
    "{ .reg .b16 l, h; .reg .b32 a, b, t; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
    "fma.rn.f16x2 t, a, $2, $4; fma.rn.f16x2 $0, b, $3, t; }"
)
_LOW = tl.constexpr("{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }")
_HIGH = tl.constexpr("{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }")


@triton.jit
def values(x, norm_weight, cols, k, factor, NORM: tl.constexpr):
    v = tl.load(x + cols, mask=cols < k, other=0.0).to(tl.float32) * factor
    if NORM:
        v = v * tl.load(norm_weight + cols, mask=cols < k, other=0.0).to(tl.float32)
    return v


@triton.jit
def packed_sum(x, norm_weight, words, w, rows, k, factor, NORM: tl.constexpr, WORDS: tl.constexpr):
    """Σ codes × weights [BLOCK_N] × 2^-8. `words` points to the weights as int32 [n, k / 4]; w is their first tile at `rows`."""
    many = k // 4
    word = tl.arange(0, WORDS)
    acc = tl.zeros_like(w)
    for start in range(0, many, WORDS):
        cols = 4 * (start + word)
        x1 = values(x, norm_weight, cols, k, factor, NORM)
        x2 = values(x, norm_weight, cols + 1, k, factor, NORM)
        x3 = values(x, norm_weight, cols + 2, k, factor, NORM)
        x4 = values(x, norm_weight, cols + 3, k, factor, NORM)
        codes = tl.inline_asm_elementwise(_CODES, "=r,f,f", [x1, x2], dtype=tl.int32, is_pure=True, pack=1)
        more = tl.inline_asm_elementwise(_CODES, "=r,f,f", [x3, x4], dtype=tl.int32, is_pure=True, pack=1)
        after = start + WORDS + word  # a tile ahead: its weights are under way while this one's are multiplied
        following = tl.load(words + rows[:, None] * many + after[None, :], mask=(after < many)[None, :], other=0)
        given = [w, codes[None, :], more[None, :], acc]
        acc = tl.inline_asm_elementwise(_MULTIPLY_ADD, "=r,r,r,r,r", given, dtype=tl.int32, is_pure=True, pack=1)
        w = following
    low = tl.inline_asm_elementwise(_LOW, "=f,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    high = tl.inline_asm_elementwise(_HIGH, "=f,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return tl.sum(low + high, 1)


@triton.jit
def plain_sum(x, norm_weight, weight, rows, k, factor, NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same in float32 over the weights [n, k], which says what `packed_sum` means."""
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, k, WIDTH):
        cols = start + tl.arange(0, WIDTH)
        v = tl.minimum(tl.maximum(values(x, norm_weight, cols, k, factor, NORM), -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
        w = tl.load(weight + rows[:, None] * k + cols[None, :], mask=(cols < k)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(w * v[None, :], 1)
    return total * 0.00390625


@triton.jit
def fp8_gemv_kernel(
    x, norm_weight, input_scale, weight, scale, bias, residual, out, n, k, eps,
    NORM: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, PACKED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(n / BLOCK_N),). x [k], weight [n, k], scale float32 [n]; bias, residual and out [n]."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = rows < n
    safe = tl.where(kept, rows, 0).to(tl.int64)
    words = weight
    first = rows
    if PACKED:
        words = weight.to(tl.pointer_type(tl.int32), bitcast=True)
        word = tl.arange(0, WORDS)
        # Volatile: the assembler moves a plain load behind the wait.
        first = tl.load(words + safe[:, None] * (k // 4) + word[None, :], mask=(word < k // 4)[None, :], other=0, volatile=True)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    factor, step = row_step(x, norm_weight, input_scale, k, eps, NORM, LIMIT, CHUNK)
    if PACKED:
        y = packed_sum(x, norm_weight, words, first, safe, k, factor / step, NORM, WORDS)
    else:
        y = plain_sum(x, norm_weight, weight, safe, k, factor / step, NORM, 4 * WORDS, BLOCK_N)
    y = y * (step * 256.0) * tl.load(scale + safe)
    if bias is not None:
        y += tl.load(bias + safe).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + safe).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=kept)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """One program's share of the weight."""

    block_n: int  # rows
    num_warps: int = 4


def gemv_tile(x: Tensor, weight: PackedWeight, fusion: Fusion) -> GemvTile | None:
    """The tile with which `one_row` takes this product, or None.

    Others run faster through `stream` (Llama-3.1-8B on an H200, µs: up and gate 39 and 32, down 20.7 and 19.2, head 150 and 123; qkv 9.6
    and 10.1, out 7.2 and 7.9). The 70B's qkv and out lose 13 µs a layer here, and what one of two or four ranks has of them 5 to 12.
    """
    n, k = weight.values.shape
    if x.shape[0] != 1 or fusion.gate is not None or fusion.needs_separate_norm or k % 4 or k > MAX_FEATURES or n >= MANY_ROWS:
        return None
    return GemvTile(16 if triton.cdiv(n, 16) >= 2 * num_sms(x.device) else 8)


def one_row(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: GemvTile) -> Tensor:
    """y [1, n] of x [1, k] and weight float8_e4m3fn [n, k], with an RMS norm before it and a residual after it."""
    n, k = weight.values.shape
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    fp8_gemv_kernel[(triton.cdiv(n, tile.block_n),)](
        x, fusion.norm_weight, weight.input_scale, weight.values, weight.scale, weight.bias, fusion.residual, out, n, k, fusion.norm_eps,
        NORM=fusion.norm_weight is not None, LIMIT=FP8_LIMIT, BLOCK_N=tile.block_n, WORDS=_WORDS,
        CHUNK=triton.next_power_of_2(k), PACKED=not x.is_cpu, num_warps=tile.num_warps, **pdl_launch_options(x),
    )  # fmt: skip
    return out
