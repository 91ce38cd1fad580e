"""The rows that the small-batch kernel multiplies, as codes in shared memory: every program makes them anew, of what others stored.

Of int8 digits, and of int4 with groups' sums, see `quant_codes`.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.linear_args import EPS, K, X
from stoker.kernels.triton.ptx.pipeline import put_codes, put_float, put_halves


@triton.constexpr_function
def code_bytes(form, widths):
    """Of a row."""
    return (1 if form == "fp8" else 2) * digits_apart(widths)


@triton.constexpr_function
def total_bytes(widths, group):
    """Of a row's groups' sums, and as many more as let lanes of several rows read different banks."""
    return 4 * max(widths) // group + 16 if group else 0


@triton.constexpr_function
def is_wide(form):
    """Whether weights, and so codes, have 16 bits."""
    return form == "bfloat16" or form == "float16"


@triton.constexpr_function
def digits_apart(widths):
    """Bytes from coarse digits to fine ones: the widest row, and as many more as let lanes of both read different banks."""
    return max(widths) + 64


@gluon.jit
def whole(x):
    """A float whose last bits are the nearest integer of |x| < 2^22, to even on a tie."""
    return x + 12582912.0


@gluon.jit
def row_of(link, token, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """x of a token, zeros after it."""
    cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    return gl.load(link[X] + token * link[K] + cols, mask=cols < link[K], other=0.0, cache_modifier=".cg")


@gluon.jit
def put_row(link, row, norms, codes, NORMED: gl.constexpr, WIDTH: gl.constexpr, FORM: gl.constexpr, WARPS: gl.constexpr):
    """The row itself, normed, as codes of 16 bits."""
    cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    v = row.to(gl.float32)
    if NORMED:
        v *= norms.to(gl.float32) * gl.rsqrt(gl.sum(v * v, 0) / link[K] + link[EPS])
    put_halves(codes + 2 * cols, v.to(gl.bfloat16 if FORM == "bfloat16" else gl.float16))


@gluon.jit
def sum_and_most(sum, most, other_sum, other_most):
    return sum + other_sum, gl.maximum(most, other_most)


@gluon.jit
def encode(
    link, row, norms, codes, totals,
    NORMED: gl.constexpr, WIDTH: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """A row's codes in shared memory, normed on the way (as `quant_codes` makes them). Returns the value of a code.

    codes: where they go, fine digits FAR bytes after the coarse ones; totals: where the groups' sums go, in fine units. Of pairs of groups
    of 32 a lane's 8 bytes of both lie side by side.
    """
    k = link[K]
    LIMIT: gl.constexpr = 448.0 if FORM == "fp8" else 127.0 * 254.0
    cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    v = row.to(gl.float32)
    weighted = v
    factor = 1.0
    if NORMED:
        weighted = v * norms.to(gl.float32)
        squares, most = gl.reduce((v * v, gl.abs(weighted)), 0, sum_and_most)
        factor = gl.rsqrt(squares / k + link[EPS])
    else:
        squares, most = gl.reduce((v, gl.abs(v)), 0, sum_and_most)  # a maximum passes over NaN; a sum does not
    step = gl.maximum(most * factor / LIMIT, 1e-12 if FORM == "fp8" else 1e-30) + squares * 0.0
    units = weighted * (factor / step)
    if FORM == "fp8":
        put_codes(codes + cols, units.to(gl.float8e4nv).to(gl.int8, bitcast=True), 4)  # eight at a time spill
    else:
        units = whole(units) - 12582912.0
        coarse = whole(units * (1.0 / 254.0))
        fine = whole(units - (coarse - 12582912.0) * 254.0)
        place = cols
        if GROUP == 32:
            place = cols // 64 * 64 + cols // 8 % 4 * 16 + cols // 32 % 2 * 8 + cols % 8
        put_codes(codes + place, coarse.to(gl.int32, bitcast=True).to(gl.int8), 8)
        put_codes(codes + FAR + place, fine.to(gl.int32, bitcast=True).to(gl.int8), 8)
        if GROUP > 0:
            sums = gl.sum(gl.reshape(units, [WIDTH // GROUP, GROUP]), 1)
            group = gl.arange(0, WIDTH // GROUP, layout=sums.type.layout)
            put_float(totals + group * 4, sums, group >= 0)
    return step


@gluon.jit
def encode_all(
    link, norms, codes, totals, NORMED: gl.constexpr, WIDTHS: gl.constexpr, AT: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The values of all tokens' codes. Each row is asked for before the one before it becomes codes."""
    WIDTH: gl.constexpr = WIDTHS[AT]
    steps = ()
    row = row_of(link, 0, WIDTH, WARPS)
    for token in gl.static_range(TOKENS):
        after = row
        if token + 1 < TOKENS:
            after = row_of(link, token + 1, WIDTH, WARPS)
        place = codes + token * code_bytes(FORM, WIDTHS)
        if is_wide(FORM):
            put_row(link, row, norms, place, NORMED, WIDTH, FORM, WARPS)
            steps = steps + (1.0,)
        else:
            at = totals + token * total_bytes(WIDTHS, GROUP)
            steps = steps + (encode(link, row, norms, place, at, NORMED, WIDTH, FORM, GROUP, WARPS, digits_apart(WIDTHS)),)
        row = after
    return steps
