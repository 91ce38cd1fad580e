"""One token against a float8_e4m3fn weight: half-precision multiply-adds, two per instruction.

    out[r] = step × scale[r] × (q · W[r]) + bias[r] + residual[r]             q = fp8(norm(x) ÷ step), W [n, k], r in 0 … n - 1

A matrix instruction is of no use for one token, and its quantized activations would need a launch before this one. Here each CTA quantizes
what it multiplies: x becomes float8_e4m3fn, then float16 × 2^-8; weights become float16 two at a time.

Grid: (ceil(n / BLOCK_N),). A CTA computes BLOCK_N rows. It reads a row of the weight as WORDS 32-bit words of 4 weights per iteration, the
next iteration's words while it multiplies the current ones:

    row r of W     | w0 w1 w2 w3 | w4 w5 w6 w7 | ...             one word per lane and row, in turn
    accumulator    | w0 q0 + w2 q2 | w1 q1 + w3 q3 |             two float16 halves, one pair per word of the tile
                     + the same of every later iteration

A float16 half adds up 2 × k ÷ 1,024 products of at most 448 × 1.75 (1.75 = 448 × 2^-8): 6,272 for k = 4,096. Halves are added in float32.

Theoretical floor: n × k bytes at the speed of memory, 3.8 µs for 4096 × 4096 on an H200 (4.42 TB/s). Reached with Llama-3.1-8B's linears:
qkv 9.6 µs, output projection 7.2 µs, with `gemm.skinny` 10.1 and 7.9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.quantized.activations import FP8_MAX, row_quantization_step
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.triton.ptx.registers import ptx
from stoker.kernels.types import Fusion

MAX_FEATURES = 4096  # every CTA reads the whole row for its largest magnitude first, which takes too long for more
MAX_WEIGHT_ROWS = 8192
_WORDS = 256  # of four weights: the width of a tile

# Results and arguments of the blocks below: $0, then the arguments in order.
_QUANTIZE_PAIR = ptx(  # float16 pair of (x1, x2), rounded to e4m3, × 2^-8
    "{ .reg .b16 p;",
    ".reg .b32 h, c;",
    "mov.b32 c, 0x1C001C00;",  # 2^-8, twice
    "cvt.rn.satfinite.e4m3x2.f32 p, $2, $1;",  # x2 in the upper byte
    "cvt.rn.f16x2.e4m3x2 h, p;",
    "mul.rn.f16x2 $0, h, c; }",
)
_MULTIPLY_ADD = ptx(  # accumulator $4 + weights of word $1 × the pairs $2 (features 0, 1) and $3 (features 2, 3)
    "{ .reg .b16 l, h;",
    ".reg .b32 a, b, t;",
    "mov.b32 {l, h}, $1;",
    "cvt.rn.f16x2.e4m3x2 a, l;",  # weights 0 and 1
    "cvt.rn.f16x2.e4m3x2 b, h;",  # weights 2 and 3
    "fma.rn.f16x2 t, a, $2, $4;",
    "fma.rn.f16x2 $0, b, $3, t; }",
)
_LOW_HALF = ptx("{ .reg .b16 l, h;", "mov.b32 {l, h}, $1;", "cvt.f32.f16 $0, l; }")
_HIGH_HALF = ptx("{ .reg .b16 l, h;", "mov.b32 {l, h}, $1;", "cvt.f32.f16 $0, h; }")


@triton.jit
def load_scaled(x_ptr, norm_weight_ptr, cols, k, factor, NORM: tl.constexpr):
    """float32: x × factor at the features `cols`, also multiplied by the norm's weight if NORM; zeros from k on."""
    x = tl.load(x_ptr + cols, mask=cols < k, other=0.0).to(tl.float32) * factor
    if NORM:
        x = x * tl.load(norm_weight_ptr + cols, mask=cols < k, other=0.0).to(tl.float32)
    return x


@triton.jit
def multiply_packed(x_ptr, norm_weight_ptr, words_ptr, words, load_rows, k, factor, NORM: tl.constexpr, WORDS: tl.constexpr):
    """float32 [BLOCK_N]: q · W × 2^-8 for the rows `load_rows`, where q is x × factor quantized to FP8.

    `words_ptr` is the weight as int32 [n, k / 4]; `words` [BLOCK_N, WORDS] is its first tile, loaded before.
    """
    row_words = k // 4
    word = tl.arange(0, WORDS)
    acc = tl.zeros_like(words)  # two float16 per element
    for start in range(0, row_words, WORDS):
        cols = 4 * (start + word)
        x0 = load_scaled(x_ptr, norm_weight_ptr, cols, k, factor, NORM)
        x1 = load_scaled(x_ptr, norm_weight_ptr, cols + 1, k, factor, NORM)
        x2 = load_scaled(x_ptr, norm_weight_ptr, cols + 2, k, factor, NORM)
        x3 = load_scaled(x_ptr, norm_weight_ptr, cols + 3, k, factor, NORM)
        q01 = tl.inline_asm_elementwise(_QUANTIZE_PAIR, "=r,f,f", [x0, x1], dtype=tl.int32, is_pure=True, pack=1)
        q23 = tl.inline_asm_elementwise(_QUANTIZE_PAIR, "=r,f,f", [x2, x3], dtype=tl.int32, is_pure=True, pack=1)
        next_word = start + WORDS + word
        next_words = tl.load(
            words_ptr + load_rows[:, None] * row_words + next_word[None, :], mask=(next_word < row_words)[None, :], other=0
        )
        arguments = [words, q01[None, :], q23[None, :], acc]
        acc = tl.inline_asm_elementwise(_MULTIPLY_ADD, "=r,r,r,r,r", arguments, dtype=tl.int32, is_pure=True, pack=1)
        words = next_words
    low = tl.inline_asm_elementwise(_LOW_HALF, "=f,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    high = tl.inline_asm_elementwise(_HIGH_HALF, "=f,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return tl.sum(low + high, 1)


@triton.jit
def multiply_unpacked(
    x_ptr, norm_weight_ptr, weight_ptr, load_rows, k, factor, NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The same result as `multiply_packed`, in float32 over the weight [n, k]: the definition, which the interpreter runs."""
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, k, WIDTH):
        cols = start + tl.arange(0, WIDTH)
        x = load_scaled(x_ptr, norm_weight_ptr, cols, k, factor, NORM)
        q = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
        w = tl.load(weight_ptr + load_rows[:, None] * k + cols[None, :], mask=(cols < k)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(w * q[None, :], 1)
    return total * 0.00390625


@triton.jit
def fp8_gemv_kernel(
    # Pointers
    x_ptr,  # [k]
    norm_weight_ptr,  # [k] or None
    input_scale_ptr,  # float32 [1]: a static scale, or None
    weight_ptr,  # float8_e4m3fn [n, k]
    scale_ptr,  # float32 [n]
    bias_ptr,  # [n] or None
    residual_ptr,  # [n] or None
    out_ptr,  # [n]
    # Sizes
    n,
    k,
    eps,
    # Constants
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest quantized activation
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,  # features of x in registers while the largest magnitude is sought
    PACKED: tl.constexpr,  # True on a GPU: inline PTX; False in the interpreter: the equivalent Triton operations
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK_N outputs of one token. LIMIT is the largest FP8 value; PACKED selects `multiply_packed`."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < n
    load_rows = tl.where(inside, rows, 0).to(tl.int64)
    words_ptr = weight_ptr
    words = rows
    if PACKED:
        words_ptr = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        word = tl.arange(0, WORDS)
        # The first tile of the weight is loaded before the wait; volatile because the assembler moves a plain load behind it.
        first_ptr = words_ptr + load_rows[:, None] * (k // 4) + word[None, :]
        words = tl.load(first_ptr, mask=(word < k // 4)[None, :], other=0, volatile=True)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    factor, step = row_quantization_step(x_ptr, norm_weight_ptr, input_scale_ptr, k, eps, NORM, LIMIT, CHUNK)
    if PACKED:
        y = multiply_packed(x_ptr, norm_weight_ptr, words_ptr, words, load_rows, k, factor / step, NORM, WORDS)
    else:
        y = multiply_unpacked(x_ptr, norm_weight_ptr, weight_ptr, load_rows, k, factor / step, NORM, 4 * WORDS, BLOCK_N)
    y = y * (step * 256.0) * tl.load(scale_ptr + load_rows)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + load_rows).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + load_rows).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The part of the weight that one CTA multiplies."""

    block_n: int  # rows
    num_warps: int = 4


def gemv_tile(x: Tensor, weight: PackedWeight, fusion: Fusion) -> GemvTile | None:
    """The tile with which `fp8_gemv` computes this product. None where it cannot, or where the skinny GEMM is faster.

    Llama-3.1-8B on an H200, µs, GEMV and skinny GEMM: gate and up 39 and 32, down 20.7 and 19.2, language model head 150 and 123, but qkv
    9.6 and 10.1, output projection 7.2 and 7.9. With the GEMV the 70B's qkv and output projection lose 13 µs per layer, and their shards
    for two or four ranks lose 5 to 12.
    """
    n, k = weight.values.shape
    if x.shape[0] != 1 or fusion.gate is not None or fusion.needs_separate_norm or k % 4 or k > MAX_FEATURES or n >= MAX_WEIGHT_ROWS:
        return None
    return GemvTile(16 if cdiv(n, 16) >= 2 * num_sms(x.device) else 8)


def fp8_gemv(x: Tensor, weight: PackedWeight, fusion: Fusion, tile: GemvTile) -> Tensor:
    """[1, n]: the product of x [1, k] and a float8_e4m3fn weight [n, k], after the fusion's RMS norm, with bias and residual added."""
    n, k = weight.values.shape
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    fp8_gemv_kernel[(cdiv(n, tile.block_n),)](
        x,
        fusion.norm_weight,
        weight.input_scale,
        weight.values,
        weight.scale,
        weight.bias,
        fusion.residual,
        out,
        n,
        k,
        fusion.norm_eps,
        NORM=fusion.norm_weight is not None,
        LIMIT=FP8_MAX,
        BLOCK_N=tile.block_n,
        WORDS=_WORDS,
        CHUNK=next_power_of_2(k),
        PACKED=not x.is_cpu,
        num_warps=tile.num_warps,
        **pdl_launch_options(x),
    )
    return out
