"""16-bit rows as two int8 digits in the GEMM for many rows, whose weights are int8.

A row of x is scale × (254 × coarse + fine) (`gemm.quantized.activations`). Each digit is a row of the operand, and the sums are exact:

    x · w = x_scale × (254 × (coarse · w) + fine · w)

    x as an operand, int8    | coarse digits of rows 0 to 7 | fine digits of rows 0 to 7 | coarse digits of rows 8 to 15 | ...
                             |<------------------ a slab of 16 rows -------------------->|

In the accumulator of wgmma, a thread has the same columns of row r and of row r + 8 of each 16 rows, so that it has both sums of a row,
and no value moves when they are combined.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLAB_TOKENS = gl.constexpr(8)  # rows of x in a slab


@gluon.constexpr_function
def count_digits(dtype):
    """The rows of the operand per row of x: 2 for int8."""
    return 2 if dtype == gl.int8 else 1


@gluon.jit
def operand_rows(m, DIGITS: gl.constexpr):
    """The rows of the operand for m rows of x: m, or those of whole slabs."""
    if DIGITS == 1:
        return m
    else:
        return gl.cdiv(m, SLAB_TOKENS) * (DIGITS * SLAB_TOKENS)


@gluon.jit
def load_row_scale(x_scale_ptr, rows, m, DIGITS: gl.constexpr):
    """The real value of one unit of the rows `rows` of the operand, for m rows of x; 0 beyond them."""
    if DIGITS == 1:
        return gl.load(x_scale_ptr + rows, mask=rows < m, other=0.0)
    else:
        tokens = rows // (DIGITS * SLAB_TOKENS) * SLAB_TOKENS + rows % SLAB_TOKENS
        unit = gl.where(rows % (DIGITS * SLAB_TOKENS) < SLAB_TOKENS, 254.0, 1.0)
        return gl.load(x_scale_ptr + tokens, mask=tokens < m, other=0.0) * unit


@gluon.jit
def combine_digits(sums):
    """[rows / 2, N] from the scaled sums [rows, N] of coarse and fine digits, in the registers of each thread."""
    SLABS: gl.constexpr = sums.shape[0] // (2 * SLAB_TOKENS)
    N: gl.constexpr = sums.shape[1]
    coarse, fine = gl.split(sums.reshape([SLABS, 2, SLAB_TOKENS, N]).permute((0, 2, 3, 1)))
    return (coarse + fine).reshape([SLABS * SLAB_TOKENS, N])
