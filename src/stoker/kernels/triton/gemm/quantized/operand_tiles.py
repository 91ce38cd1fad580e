"""Loads tiles of the operands of a quantized GEMM, and combines the sums of coarse and fine digits. See `products` for the tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(pointers, inside, MASKED: tl.constexpr):
    """Load the values at `pointers`; with MASKED, zeros where `inside` is False."""
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_x_tile(x_cols_ptr, tokens, cols, k, EVEN_K: tl.constexpr):
    """[BLOCK_K, COLUMNS]: the features `cols` of each column of the product, zeros for padding and beyond k.

    `x_cols_ptr`: the result of `x_columns`; `tokens`: TokenTile. Padding is masked: if its columns repeated a token, all CTAs would read
    the same lines from one slice of L2 again and again. On an H200, FP8 tiles of 128 tokens took twice as long for 192 rows as for 256.
    """
    inside = tokens.column_inside[None, :]
    if not EVEN_K:
        inside = inside & (cols < k)[:, None]
    return tl.load(x_cols_ptr + cols[:, None], mask=inside, other=0.0)


@triton.jit
def x_columns(x, tokens, sizes):
    """[1, COLUMNS]: pointers to the first feature of each column of the product.

    `x`: ActivationPointers; `tokens`: TokenTile; `sizes`: GemmSizes.
    """
    return x.values_ptr + tokens.column_row.to(tl.int64)[None, :] * sizes.stride_x


@triton.jit
def weight_rows(weight, rows, sizes, GATED: tl.constexpr):
    """(pointers to this tile's weight rows, pointers to the rows that they gate), [BLOCK_N] each; without a gate both are the same."""
    rows_ptr = weight.values_ptr + rows.load_row * sizes.stride_weight
    if GATED:
        up_rows_ptr = weight.values_ptr + (rows.load_row + sizes.n) * sizes.stride_weight
    else:
        up_rows_ptr = rows_ptr
    return rows_ptr, up_rows_ptr


@triton.jit
def combine_digits(acc):
    """254 × coarse + fine: [BLOCK_N, TOKENS] from acc [BLOCK_N, 2 × TOKENS]. The sums over one group fit int32."""
    coarse, fine = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    return coarse * 254 + fine
