"""Loading tiles of the operands of a quantized GEMM, and joining the digits of its sums. See `products` for the tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(pointers, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def x_columns(x, tokens, sizes):
    """[1, COLUMNS]: pointers to the first feature of each column."""
    return x.values_ptr + tokens.column_row.to(tl.int64)[None, :] * sizes.stride_x


@triton.jit
def join_digits(acc):
    """254 × coarse + fine: [BLOCK_N, TOKENS] of [BLOCK_N, 2 × TOKENS]. int32 holds a group's sums of it."""
    coarse, fine = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    return coarse * 254 + fine
