"""The main loop of the quantized GEMM kernels: one CTA multiplies its weight tile by the activations over a slice of the input features.

The weight is the left operand of `tl.dot`, so that the long side of a matrix instruction (16 rows of mma.sync, 64 of wgmma) is filled
however small the number of tokens is. One iteration multiplies BLOCK_K features:

                          x tile [BLOCK_K, COLUMNS]                 COLUMNS = DIGITS × TOKENS:
                          | t0 | t1 | ...            or, as digits  | t0 coarse | t0 fine | t1 coarse | t1 fine | ...
    W tile [BLOCK_N,      +--------------------
            BLOCK_K]      | sums [BLOCK_N, COLUMNS]  += W tile · x tile

An activation is one column, or two: the coarse and the fine int8 digit (`activations`). Both digits of a token are neighbours so that one
thread holds both sums and combines them without shared memory (with all coarse digits first: 548 instead of 396 instructions per iteration
of 64 rows × 256 features × 32 tokens).

The products of int4 are in `int4_products`, those of FP4 experts in `fp4_products`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.fp4_products import multiply_fp4
from stoker.kernels.triton.gemm.quantized.int4_products import multiply_int4
from stoker.kernels.triton.gemm.quantized.operand_tiles import combine_digits, load_tile, load_x_tile, weight_rows, x_columns
from stoker.kernels.triton.ptx.unpack import unpack_8bit


@triton.jit
def multiply(
    x,  # ActivationPointers
    weight,  # WeightPointers, of one expert
    tokens,  # TokenTile
    rows,  # WeightRows
    begin,  # the slice of input features
    end,
    sizes,  # GemmSizes
    FORMAT: tl.constexpr,  # QuantizedWeightFormat
    TILE: tl.constexpr,  # GemmTile
    PRODUCT: tl.constexpr,  # ProductFormat
    GATED: tl.constexpr,
):
    """(sums, sums of the up rows), float32 [BLOCK_N, TOKENS] each: W · x over the features begin : end. Without a gate both are the same.

    Scales of groups and blocks are applied; scales of whole rows of x and of the weight are not. `x`: ActivationPointers; `weight`:
    WeightPointers; `tokens`: TokenTile; `rows`: WeightRows; `sizes`: GemmSizes.
    """
    FORM: tl.constexpr = FORMAT.form
    if FORM == "int4":
        return multiply_int4(x, weight, tokens, rows, begin, end, sizes, FORMAT, TILE, PRODUCT, GATED)
    elif FORM == "fp4":
        return multiply_fp4(x, weight, tokens, rows, begin, end, sizes, FORMAT, TILE, PRODUCT, GATED)
    elif FORM == "grouped_int8":
        tl.static_assert(not GATED)
        return multiply_grouped_int8(x, weight, tokens, rows, begin, end, sizes, FORMAT, TILE, PRODUCT)
    else:
        return multiply_bytes(x, weight, tokens, rows, begin, end, sizes, FORMAT, TILE, PRODUCT, GATED)


@triton.jit
def multiply_bytes(
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
    """Compute `multiply` for the forms direct, upcast and block_fp8."""
    FORM: tl.constexpr = FORMAT.form
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    COLUMNS: tl.constexpr = PRODUCT.digits * TILE.tokens
    IS_INT8: tl.constexpr = FORM == "direct" and x.values_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros([BLOCK_N, COLUMNS], tl.int32 if IS_INT8 else tl.float32)
    acc_up = acc
    x_cols_ptr = x_columns(x, tokens, sizes)
    weight_rows_ptr, up_rows_ptr = weight_rows(weight, rows, sizes, GATED)
    for start in range(begin, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        x_tile = load_x_tile(x_cols_ptr, tokens, cols, sizes.k, PRODUCT.even_k)  # [BLOCK_K, COLUMNS]
        row_scale = None
        up_scale = None
        x_scale = None
        if FORM == "block_fp8":
            block = start // FORMAT.group
            blocks = tl.cdiv(sizes.k, FORMAT.group)
            x_scale = tl.load(x.scale_ptr + block * tokens.num_rows + tokens.x_row)  # [TOKENS]
            row_scale = tl.load(weight.scale_ptr + rows.load_row // FORMAT.block_rows * blocks + block)  # [BLOCK_N]
            if GATED:
                up_scale = tl.load(weight.scale_ptr + (rows.load_row + sizes.n) // FORMAT.block_rows * blocks + block)
        acc = add_bytes(acc, weight_rows_ptr, x_tile, cols, sizes.k, row_scale, x_scale, FORM, PRODUCT)
        if GATED:
            acc_up = add_bytes(acc_up, up_rows_ptr, x_tile, cols, sizes.k, up_scale, x_scale, FORM, PRODUCT)
    sums = combine_digit_columns(acc, TILE, PRODUCT)
    if GATED:
        return sums, combine_digit_columns(acc_up, TILE, PRODUCT)
    else:
        return sums, sums


@triton.jit
def add_bytes(acc, weight_rows_ptr, x_tile, cols, k, row_scale, x_scale, FORM: tl.constexpr, PRODUCT: tl.constexpr):
    """acc + W[rows, cols] · x_tile. For block_fp8 the product is scaled by row_scale [BLOCK_N] and x_scale [TOKENS] of these columns."""
    IMPRECISE: tl.constexpr = PRODUCT.imprecise
    PRECISION: tl.constexpr = PRODUCT.precision
    w = load_tile(weight_rows_ptr[:, None] + cols[None, :], (cols < k)[None, :], not PRODUCT.even_k)  # [BLOCK_N, BLOCK_K]
    if FORM == "upcast":
        w = unpack_8bit(w, x_tile.dtype, PRODUCT.packed)
    if FORM == "block_fp8":
        product = tl.dot(w, x_tile, max_num_imprecise_acc=IMPRECISE)
        return acc + product * row_scale[:, None] * x_scale[None, :]
    else:
        return tl.dot(w, x_tile, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)


@triton.jit
def multiply_grouped_int8(
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
):
    """Compute `multiply` for the form grouped_int8. Each group is one product, whose result is scaled and added."""
    GROUP: tl.constexpr = FORMAT.group
    ZERO: tl.constexpr = FORMAT.zero
    BLOCK_N: tl.constexpr = TILE.block_n
    TOKENS: tl.constexpr = TILE.tokens
    GROUPS: tl.constexpr = TILE.groups
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    x_cols_ptr = x_columns(x, tokens, sizes)
    weight_rows_ptr = weight.values_ptr + rows.load_row * sizes.stride_weight
    for start in range(begin, end, TILE.block_k):
        for i in tl.static_range(GROUPS):
            cols = start + i * GROUP + tl.arange(0, GROUP)
            x_tile = load_x_tile(x_cols_ptr, tokens, cols, sizes.num_features, PRODUCT.even_k)  # [GROUP, COLUMNS]
            w = load_tile(weight_rows_ptr[:, None] + cols[None, :], (cols < sizes.k)[None, :], not PRODUCT.even_k)  # [BLOCK_N, GROUP]
            group = start // GROUP + i
            sums = None
            if PRODUCT.digits == 2:
                sums = tl.load(x.group_sums_ptr + group * tokens.num_rows + tokens.x_row)  # [TOKENS]
            offset = rows.load_row * tl.cdiv(sizes.k, GROUP) + group
            acc = add_int8_group(acc, w, x_tile, sums, weight.scale_ptr, weight.zero_ptr, offset, ZERO, PRODUCT)
    return acc, acc


@triton.jit
def add_int8_group(acc, w, x_tile, group_sums, scale_ptr, zero_ptr, offset, ZERO: tl.constexpr, PRODUCT: tl.constexpr):
    """acc + the scaled product of one group of int8 weights w, whose scales are at the element offsets `offset` [BLOCK_N].

    `group_sums` [TOKENS] are the sums of x over the group; they are read if x is stored as digits.
    """
    PRECISION: tl.constexpr = PRODUCT.precision
    s = tl.load(scale_ptr + offset).to(tl.float32)
    if x_tile.dtype == tl.int8:
        acc += combine_digits(tl.dot(w, x_tile, out_dtype=tl.int32)).to(tl.float32) * s[:, None]
        total = group_sums
    else:
        acc += tl.dot(unpack_8bit(w, x_tile.dtype, PRODUCT.packed), x_tile, input_precision=PRECISION) * s[:, None]
        total = tl.sum(x_tile.to(tl.float32), 0)
    if ZERO == "float":
        acc += tl.load(zero_ptr + offset).to(tl.float32)[:, None] * total[None, :]
    return acc


@triton.jit
def combine_digit_columns(acc, TILE: tl.constexpr, PRODUCT: tl.constexpr):
    """float32 [BLOCK_N, TOKENS] from the accumulator [BLOCK_N, COLUMNS], whose digit columns are combined as 254 × coarse + fine.

    It is computed in float32, because int32 cannot hold the sum over all features.
    """
    if PRODUCT.digits == 2 and acc.shape[1] != TILE.tokens:
        return combine_digits(acc.to(tl.float32))
    else:
        return acc.to(tl.float32)
