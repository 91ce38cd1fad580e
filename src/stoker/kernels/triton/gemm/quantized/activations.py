"""Activations as the quantized linears read them: a norm applied, then rounded to fp8 or int8 codes, all in one pass over each row.

`digits` stands for weight-only formats: an activation is two int8 digits, coarse × 254 + fine, in units of its row's largest magnitude
÷ 32258. That is 15 bits and a sign, so the product is nearly that of the activation itself, while the matrix units multiply the stored
integers as they are: no weight is ever widened, which is what holds small linears of 8-bit weights below the speed of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

FP8_LIMIT, INT8_LIMIT, COARSE = 448.0, 127.0, 254.0
LIMITS = {"fp8": FP8_LIMIT, "int8": INT8_LIMIT, "digits": INT8_LIMIT * COARSE}
_CHUNK = 4096  # features in registers at a time
_WHOLE = 32768  # a row of up to so many stays in registers


@dataclass(frozen=True, slots=True)
class Codes:
    """x [M, K] as codes."""

    codes: Tensor  # int8 or float8_e4m3fn [M, padded K]; digits: [2 × M, padded K], the coarse ones first. Zeros past K
    scale: Tensor  # float32 [M]: the value of a code (of a fine digit), or [groups, M] when each group of features has its own
    sums: Tensor | None = None  # digits: float32 [groups, M], the sum of each group in fine units


@triton.jit
def nearest(x):
    """The nearest integer, to even on a tie, for |x| < 2^22: adding 1.5 × 2^23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def row_values(x_row, norm_weight, cols, k, NORM: tl.constexpr, GATE: tl.constexpr):
    """float32 (values of a row, the same times the norm's weight). With GATE, a row holds k gates, then the k that they gate."""
    v = tl.load(x_row + cols, mask=cols < k, other=0.0).to(tl.float32)
    if GATE is not None:
        v = activated(v, GATE) * tl.load(x_row + k + cols, mask=cols < k, other=0.0).to(tl.float32)
        v = v.to(x_row.dtype.element_ty).to(tl.float32)  # as it would have been stored
    weighted = v
    if NORM:
        weighted = v * tl.load(norm_weight + cols, mask=cols < k, other=0.0).to(tl.float32)
    return v, weighted


@triton.jit
def step_of(squares, most, input_scale, k, eps, NORM: tl.constexpr, LIMIT: tl.constexpr):
    """(the norm's factor, the value of a code) from a row's sum of squares and its largest magnitude before that factor."""
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(squares / k + eps)
    if input_scale is not None:
        step = tl.load(input_scale)
    else:
        step = most * factor / LIMIT
    # A maximum passes over NaN; the sum of squares does not.
    return factor, tl.maximum(step, 1e-12 if LIMIT < 1000 else 1e-30) + squares * 0.0


@triton.jit
def row_step(
    x_row, norm_weight, input_scale, k, eps, NORM: tl.constexpr, LIMIT: tl.constexpr, CHUNK: tl.constexpr, GATE: tl.constexpr = None
):
    """`step_of` a row read in chunks."""
    squares = tl.zeros([CHUNK], tl.float32)
    most = tl.zeros([CHUNK], tl.float32)
    for start in range(0, k, CHUNK):
        v, weighted = row_values(x_row, norm_weight, start + tl.arange(0, CHUNK), k, NORM, GATE)
        squares += v * v
        most = tl.maximum(most, tl.abs(weighted))
    return step_of(tl.sum(squares, 0), tl.max(most, 0), input_scale, k, eps, NORM, LIMIT)


@triton.jit
def encode(
    x_row, norm_weight, codes_row, to_fine, sums_row, rows, factor, step, k, begin, end,
    NORM: tl.constexpr, DIGITS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, GATE: tl.constexpr = None,
):  # fmt: skip
    """Codes of features begin : end (a multiple of GROUP, and past k where the codes are padded) of one row of `rows`.

    Fine digits lie `to_fine` after the coarse ones. sums_row points to the row's sum of group 0.
    """
    for start in range(begin, end, CHUNK):
        _, weighted = row_values(x_row, norm_weight, start + tl.arange(0, CHUNK), k, NORM, GATE)
        store_codes(weighted * factor, codes_row, to_fine, sums_row, rows, step, start, end, DIGITS, GROUP, CHUNK)


@triton.jit
def store_codes(
    v, codes_row, to_fine, sums_row, rows, step, start, end, DIGITS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Codes of v, which are the CHUNK features from `start` on; those from `end` on belong to others."""
    cols = start + tl.arange(0, CHUNK)
    units = v * (1.0 / step)
    place = codes_row + cols
    if DIGITS == 2:
        units = nearest(tl.minimum(tl.maximum(units, -32258.0), 32258.0))
        coarse = nearest(units / 254.0)
        fine = units - coarse * 254.0
        tl.store(place, coarse.to(tl.int8), mask=cols < end)
        tl.store(place + to_fine, fine.to(tl.int8), mask=cols < end)
        if sums_row is not None:
            group = start // GROUP + tl.arange(0, CHUNK // GROUP)
            tl.store(sums_row + group * rows, tl.sum(tl.reshape(units, (CHUNK // GROUP, GROUP)), 1), mask=group * GROUP < end)
    else:
        tl.store(place, rounded(units, codes_row.dtype.element_ty), mask=cols < end)


@triton.jit
def rounded(units, DTYPE: tl.constexpr):
    """The nearest codes within the range of DTYPE."""
    if DTYPE == tl.int8:  # noqa: SIM300
        return nearest(tl.minimum(tl.maximum(units, -127.0), 127.0)).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(units, -448.0), 448.0).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def encode_kernel(
    x, norm_weight, input_scale, codes, scale, sums, rows, k, padded, stride_x, eps,
    NORM: tl.constexpr, DIGITS: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr,
    CHUNK: tl.constexpr, WHOLE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row, with one scale. WHOLE: a chunk holds the row, which then is read once."""
    row = tl.program_id(0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    x_row = x + row.to(tl.int64) * stride_x
    sums_row = sums
    if sums is not None:
        sums_row = sums + row
    codes_row = codes + row.to(tl.int64) * padded
    to_fine = tl.cast(rows, tl.int64) * padded
    if WHOLE:
        v, weighted = row_values(x_row, norm_weight, tl.arange(0, CHUNK), k, NORM, GATE)
        factor, step = step_of(tl.sum(v * v, 0), tl.max(tl.abs(weighted), 0), input_scale, k, eps, NORM, LIMIT)
        store_codes(weighted * factor, codes_row, to_fine, sums_row, rows, step, 0, padded, DIGITS, GROUP, CHUNK)
    else:
        factor, step = row_step(x_row, norm_weight, input_scale, k, eps, NORM, LIMIT, CHUNK, GATE)
        encode(x_row, norm_weight, codes_row, to_fine, sums_row, rows, factor, step, k, 0, padded, NORM, DIGITS, GROUP, CHUNK, GATE)
    tl.store(scale + row, step)


@triton.jit(do_not_specialize=["rows"])
def encode_groups_kernel(x, codes, scale, rows, k, padded, stride_x, GROUP: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program: CHUNK features of one row, e4m3 with a scale for each GROUP of them."""
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    group = tl.program_id(1) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = tl.load(x + row * stride_x + cols, mask=cols < k, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(v), 1) / 448.0, 1e-12) + tl.sum(v, 1) * 0.0
    tl.store(scale + group.to(tl.int64) * rows + row, step, mask=group * GROUP < padded)
    tl.store(codes + row * padded + cols, rounded(tl.div_rn(v, step[:, None]), codes.dtype.element_ty), mask=cols < padded)


def empty_codes(x: Tensor, form: str, padded: int, group: int = 0) -> Codes:
    """What `encode_rows` fills."""
    rows = x.shape[0] * (2 if form == "digits" else 1)
    dtype = torch.float8_e4m3fn if form == "fp8" else torch.int8
    codes = torch.empty((rows, padded), dtype=dtype, device=x.device)
    sums = (
        torch.empty((triton.cdiv(padded, group), x.shape[0]), dtype=torch.float32, device=x.device) if form == "digits" and group else None
    )
    return Codes(codes, torch.empty(x.shape[0], dtype=torch.float32, device=x.device), sums)


def encode_rows(
    x: Tensor, form: str, padded: int, group: int = 0,
    norm_weight: Tensor | None = None, eps: float = 0.0, input_scale: Tensor | None = None, gate: str | None = None,
) -> Codes:  # fmt: skip
    """Codes of x [M, K], after an RMS norm when there is `norm_weight`. `form` is fp8, int8 or digits; `group` asks for digits' sums.

    With `gate`, x is [M, 2 × K], gates and what they gate: the codes are those of act(gate) × it.
    """
    made = empty_codes(x, form, padded, group)
    whole = max(triton.next_power_of_2(padded), 2 * group, 128)
    chunk = whole if whole <= _WHOLE else _CHUNK
    if x.shape[0]:
        encode_kernel[(x.shape[0],)](
            x, norm_weight, input_scale, made.codes, made.scale, made.sums,
            x.shape[0], x.shape[1] // (2 if gate else 1), padded, x.stride(0), eps,
            NORM=norm_weight is not None, DIGITS=2 if form == "digits" else 1, LIMIT=LIMITS[form], GROUP=max(group, 1), GATE=gate,
            CHUNK=chunk, WHOLE=chunk == whole, num_warps=min(16, max(1, chunk // 512)), **pdl_launch_options(x),
        )  # fmt: skip
    return made


def encode_groups(x: Tensor, group: int) -> Codes:
    """e4m3 codes of x [M, K] with a scale for each `group` neighbours (a power of two): scale [groups, M]."""
    rows, k = x.shape
    groups = triton.cdiv(k, group)
    codes = torch.empty((rows, groups * group), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    chunk = max(group, min(2048, triton.next_power_of_2(k)))
    if rows:
        encode_groups_kernel[(rows, triton.cdiv(k, chunk))](
            x, codes, scale, rows, k, groups * group, x.stride(0), GROUP=group, CHUNK=chunk, num_warps=4, **pdl_launch_options(x)
        )
    return Codes(codes, scale)
