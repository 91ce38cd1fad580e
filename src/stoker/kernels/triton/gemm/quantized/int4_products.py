"""The main loop of the quantized GEMM kernels for int4 weights. See `products` for the tiles and the digits of activations.

A group of int4 has its features in the low nibbles of GROUP bytes, and the next group in the high nibbles of the same bytes (see `int4`).
An iteration of int4 therefore multiplies pairs of groups, and unpacks them with a mask and a shift. With stored values w, scale s, offset
b, and q the integers that the digits stand for, a group adds

    digits:       Σ s × (w · q) + b × Σ q                          int32 products, joined and scaled per group; Σ q is `group_sums`
    16-bit x:     Σ (s × (w - zero)) · x                           values dequantized in registers
                  or s × Σ (w - zero) · x                          sums scaled instead: fewer multiplications, more registers
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.group_scales import group_tensors, load_pair_scales, scale_and_offset
from stoker.kernels.triton.gemm.quantized.operand_tiles import combine_digits, load_x_tile, weight_rows, x_columns
from stoker.kernels.triton.ptx.unpack import dequantize_16bit, int4_bias, multiply_16bit, unpack_fp4, unpack_int4, unpack_int4_biased

# int4 × 16-bit activations: the sums of groups of at least SCALED_SUMS_MIN_GROUP are scaled instead of the values, for at most
# SCALED_SUMS_MAX_TOKENS tokens. Llama-3.1-8B's gate and up on an H200: 42.7 -> 38.7 µs for 32 rows, 54.0 -> 60.5 for 64 (registers).
SCALED_SUMS_MIN_GROUP = tl.constexpr(64)
SCALED_SUMS_MAX_TOKENS = tl.constexpr(32)


@triton.jit
def multiply_int4(
    x,
    weight,
    tokens,
    rows,
    begin,
    end,
    sizes,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute `products.multiply` for int4 weights.

    With digits, the scales and zeros of the next iteration are loaded one iteration ahead: loaded where they are used, each iteration would
    wait for memory. With 16-bit activations they scale operands of `tl.dot`, and values that are carried from the previous iteration would
    make the compiler move these operands through shared memory.
    """
    GROUP: tl.constexpr = FORMAT.group
    ZERO: tl.constexpr = FORMAT.zero
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    PAIRS: tl.constexpr = TILE.groups
    TOKENS: tl.constexpr = TILE.tokens
    PAIR_TENSORS: tl.constexpr = 2 * group_tensors(ZERO)  # scales and zeros of a pair of groups
    PREFETCH: tl.constexpr = PRODUCT.digits == 2
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    acc_up = acc
    x_cols_ptr = x_columns(x, tokens, sizes)
    weight_rows_ptr, up_rows_ptr = weight_rows(weight, rows, sizes, GATED)
    last = sizes.k - BLOCK_K
    scale_ptr, zero_ptr = weight.scale_ptr, weight.zero_ptr
    if PREFETCH:
        next_scales = load_pair_scales(scale_ptr, zero_ptr, tl.minimum(begin, last), rows.load_row, sizes.n, ZERO, GROUP, PAIRS, GATED)
    for start in range(begin, end, BLOCK_K):
        if PREFETCH:
            scales = next_scales
            next_start = tl.minimum(start + BLOCK_K, last)
            next_scales = load_pair_scales(scale_ptr, zero_ptr, next_start, rows.load_row, sizes.n, ZERO, GROUP, PAIRS, GATED)
        else:
            scales = load_pair_scales(scale_ptr, zero_ptr, start, rows.load_row, sizes.n, ZERO, GROUP, PAIRS, GATED)
        for pair in tl.static_range(PAIRS):
            first_col = start + pair * 2 * GROUP
            sums = ()
            if PREFETCH:
                sums_ptr = x.group_sums_ptr + (first_col // GROUP) * tokens.num_rows + tokens.x_row
                sums = (tl.load(sums_ptr), tl.load(sums_ptr + tokens.num_rows))  # of the low and of the high group
            cols = first_col + tl.arange(0, GROUP)
            low_x = load_x_tile(x_cols_ptr, tokens, cols, sizes.num_features, PRODUCT.even_k)  # [GROUP, COLUMNS]
            high_x = load_x_tile(x_cols_ptr, tokens, cols + GROUP, sizes.num_features, PRODUCT.even_k)
            byte = first_col // 2 + tl.arange(0, GROUP)
            pair_scales = scales[PAIR_TENSORS * pair * (2 if GATED else 1) :]
            packed = tl.load(weight_rows_ptr[:, None] + byte[None, :])  # uint8 [BLOCK_N, GROUP]
            acc = add_int4_pair(acc, packed, low_x, high_x, sums, pair_scales[:PAIR_TENSORS], ZERO, PRODUCT)
            if GATED:
                packed = tl.load(up_rows_ptr[:, None] + byte[None, :])
                up_scales = pair_scales[PAIR_TENSORS : 2 * PAIR_TENSORS]
                acc_up = add_int4_pair(acc_up, packed, low_x, high_x, sums, up_scales, ZERO, PRODUCT)
    return acc, acc_up


@triton.jit
def add_int4_pair(acc, packed, low_x, high_x, group_sums, scales, ZERO: tl.constexpr, PRODUCT: tl.constexpr):
    """acc + the products of a pair of groups: the low nibbles of `packed` by low_x, the high ones by high_x.

    `scales` is the part of `load_pair_scales` for this pair; `group_sums` are the sums of x for both groups, used with digits only.
    """
    PACKED: tl.constexpr = PRODUCT.packed
    low_scale = scales[: len(scales) // 2]
    high_scale = scales[len(scales) // 2 :]
    if low_x.dtype == tl.int8:
        low, high = unpack_int4(packed, PACKED)
        s, b = scale_and_offset(low_scale, ZERO)
        acc = (acc + b[:, None] * group_sums[0][None, :]) + combine_digits(tl.dot(low, low_x, out_dtype=tl.int32)).to(tl.float32) * s[
            :, None
        ]
        s, b = scale_and_offset(high_scale, ZERO)
        high_product = combine_digits(tl.dot(high, high_x, out_dtype=tl.int32)).to(tl.float32)
        acc = (acc + b[:, None] * group_sums[1][None, :]) + high_product * s[:, None]
    else:
        if ZERO == "e2m1":
            low, high = unpack_fp4(packed, low_x.dtype, PACKED)
        else:
            low, high = unpack_int4_biased(packed, low_x.dtype, PACKED)
        if (ZERO == "none" or ZERO == "int") and packed.shape[1] >= SCALED_SUMS_MIN_GROUP and acc.shape[1] <= SCALED_SUMS_MAX_TOKENS:
            low_product = tl.dot(subtract_zero(low, low_scale, ZERO, PACKED), low_x, input_precision="ieee")
            acc += low_product * low_scale[0].to(tl.float32)[:, None]
            high_product = tl.dot(subtract_zero(high, high_scale, ZERO, PACKED), high_x, input_precision="ieee")
            acc += high_product * high_scale[0].to(tl.float32)[:, None]
        else:
            acc = tl.dot(dequantize_nibbles(low, low_scale, ZERO, PACKED), low_x, acc, input_precision="ieee")
            acc = tl.dot(dequantize_nibbles(high, high_scale, ZERO, PACKED), high_x, acc, input_precision="ieee")
    return acc


@triton.jit
def subtract_zero(nibbles, scale, ZERO: tl.constexpr, PACKED: tl.constexpr):
    """w - zero for values w from `unpack_int4_biased`, computed without rounding. `scale` is a result of `load_scale_and_zero`."""
    BIAS: tl.constexpr = int4_bias(nibbles.dtype)
    if ZERO == "none":
        zero = BIAS + 8.0
    else:
        zero = (BIAS + scale[1].to(tl.float32))[:, None]
    if PACKED:
        if ZERO == "int":
            zero = zero.to(nibbles.dtype)
        return (nibbles - zero).to(nibbles.dtype)
    else:  # the interpreter has no arithmetic of bfloat16
        return (nibbles.to(tl.float32) - zero).to(nibbles.dtype)


@triton.jit
def dequantize_nibbles(nibbles, scale, ZERO: tl.constexpr, PACKED: tl.constexpr):
    """The real values of `nibbles` from `unpack_int4_biased`, in their dtype: (w - zero) × scale, or w × scale + offset.

    For e2m1, `nibbles` are values from `unpack_fp4`, which are multiplied by the scale.

    The only rounding is that of the product (and of the sum with an offset). `scale` is a result of `load_scale_and_zero`.
    """
    BIAS: tl.constexpr = int4_bias(nibbles.dtype)
    s = scale[0].to(nibbles.dtype)[:, None]
    if ZERO == "e2m1":
        if PACKED and nibbles.dtype.primitive_bitwidth == 16:
            return multiply_16bit(nibbles, s)
        else:
            return (nibbles.to(tl.float32) * s.to(tl.float32)).to(nibbles.dtype)
    if ZERO == "none":
        zero = BIAS + 8.0
    elif ZERO == "int":
        zero = (BIAS + scale[1].to(tl.float32))[:, None]
    else:
        zero = BIAS
    if PACKED and nibbles.dtype.primitive_bitwidth == 16:
        zero = (tl.zeros_like(s) + zero).to(nibbles.dtype)
        if ZERO == "float":
            return dequantize_16bit(nibbles, zero, s, scale[1].to(nibbles.dtype)[:, None])
        else:
            return dequantize_16bit(nibbles, zero, s, None)
    else:
        values = (nibbles.to(tl.float32) - zero) * s.to(tl.float32)
        if ZERO == "float":
            values += scale[1].to(tl.float32)[:, None]
        return values.to(nibbles.dtype)
