"""Activation quantization: rows of activations rounded to FP8 or int8 in one pass, after an optional gate and RMS norm.

For each row x of k features (h is its input to the product; without a norm, h = x):

    h    = x × rsqrt(mean(x²) + eps) × norm_weight
    step = max |h| ÷ L, or the static `input_scale`              L: 448 (fp8), 127 (int8), 127 × 254 (digits)
    q    = round(h ÷ step), clamped to ± L                       h ≈ q × step

"digits" serve weight-only formats. The integer q of 16 bits is stored as two int8 digits in base 254,

    q = 254 × coarse + fine,      coarse = round(q ÷ 254),  -127 <= coarse, fine <= 127

so that W · q = 254 × (W · coarse) + W · fine: two int8 products with the stored integers W. No weight is converted to a wider dtype,
which is what keeps small linears of 8-bit weights below the speed of memory, and 15 bits and a sign of each activation are retained.

    values int8 [2 × M, padded k]:   row 0     | coarse digits of token 0     | 0 0 |     zeros from k to padded k
                                     ...
                                     row M     | fine digits of token 0       | 0 0 |
                                     ...
    group_sums float32 [groups, M]:  Σ q over each group of features; the zero point of a group is multiplied by it

"slabs" are digits in the order in which `gemm.large` multiplies them: the coarse digits of eight rows, then their fine ones.

Grid of `quantize_rows_kernel`: one CTA per row. Of `quantize_groups_kernel`, which has a scale per row and group: rows × chunks.

Theoretical floor: one read of x and one write of the values at the speed of memory. With few rows the launch itself takes longer: about
1 µs in a decode step of one row (AWQ of Llama-3.1-8B on an H200, 128 launches: 2.13 ms per step, 2.00 without them). The linear kernel
saves this launch for one row where it is faster to quantize the row in each CTA (`QuantTile.encode`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.gemm.large.digits import SLAB_TOKENS
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait

FP8_MAX, INT8_MAX, DIGIT_BASE = 448.0, 127.0, 254.0
LARGEST_VALUES = {"fp8": FP8_MAX, "int8": INT8_MAX, "digits": INT8_MAX * DIGIT_BASE, "slabs": INT8_MAX * DIGIT_BASE}  # L above
_SLAB_ROWS = SLAB_TOKENS.value
_CHUNK = 4096  # features in registers at a time, of rows that are read twice
_MAX_ROW_IN_REGISTERS = 32768  # rows of at most this many features are read once
_MAX_REGISTERS = 64  # of a thread of 16 warps, so that two CTAs share an SM: one computes while the other one loads


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Activations x [M, K], quantized: x ≈ values × scale."""

    # int8 or float8_e4m3fn [M, padded K]; digits: [2 × M, padded K], the coarse ones first; slabs: M is rounded up. Zeros past K
    values: Tensor
    scale: Tensor  # float32 [M]: the real value of one unit (of a fine digit), or [groups, M] when each group of features has its own
    group_sums: Tensor | None = None  # digits: float32 [groups, M], the sum of each group in units of the fine digit


class QuantizedRow(NamedTuple):
    """The addresses at which a kernel stores one quantized row."""

    values_ptr: Any  # the row's values, or coarse digits
    fine_offset: Any  # elements from a coarse digit to its fine digit
    group_sums_ptr: Any  # the row's sum of group 0; None: no sums
    stride_group: Any  # elements from the sum of a group to that of the next one


@triton.jit
def round_half_even(x):
    """x rounded to the nearest integer, ties to even, as float32, for |x| < 2^22: adding 1.5 × 2^23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def row_values(x_row_ptr, norm_weight_ptr, cols, k, NORM: tl.constexpr, GATE: tl.constexpr):
    """(x, x × norm weight) of the features `cols` of one row, float32; zeros from k on.

    With GATE, the row holds k gates, then k values, and x is act(gate) × value.
    """
    x = tl.load(x_row_ptr + cols, mask=cols < k, other=0.0).to(tl.float32)
    if GATE is not None:
        x = activated(x, GATE) * tl.load(x_row_ptr + k + cols, mask=cols < k, other=0.0).to(tl.float32)
        x = x.to(x_row_ptr.dtype.element_ty).to(tl.float32)  # rounded as a kernel of its own would have stored it
    weighted = x
    if NORM:
        weighted = x * tl.load(norm_weight_ptr + cols, mask=cols < k, other=0.0).to(tl.float32)
    return x, weighted


@triton.jit
def quantization_step(squares, largest, input_scale_ptr, k, eps, NORM: tl.constexpr, LIMIT: tl.constexpr):
    """(factor of the norm, quantization step) of one row of k features. The factor is 1 without NORM.

    `squares` is its sum of squares, `largest` the largest magnitude after the norm's weight and before the norm's factor. The step is
    `input_scale` if given, but at least a small number. LIMIT is the largest quantized value. A NaN in the row makes the step NaN.
    """
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(squares / k + eps)
    if input_scale_ptr is not None:
        step = tl.load(input_scale_ptr)
    else:
        step = largest * factor / LIMIT
    # + squares × 0: a maximum ignores NaN, a sum does not.
    return factor, tl.maximum(step, 1e-12 if LIMIT < 1000 else 1e-30) + squares * 0.0


@triton.jit
def row_quantization_step(
    x_row_ptr,
    norm_weight_ptr,
    input_scale_ptr,
    k,
    eps,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
    GATE: tl.constexpr = None,
):
    """(factor of the norm, quantization step) of one row, which is read in chunks of CHUNK features."""
    squares = tl.zeros([CHUNK], tl.float32)
    largest = tl.zeros([CHUNK], tl.float32)
    for start in range(0, k, CHUNK):
        x, weighted = row_values(x_row_ptr, norm_weight_ptr, start + tl.arange(0, CHUNK), k, NORM, GATE)
        squares += x * x
        largest = tl.maximum(largest, tl.abs(weighted))
    return quantization_step(tl.sum(squares, 0), tl.max(largest, 0), input_scale_ptr, k, eps, NORM, LIMIT)


@triton.jit
def quantize_row(
    x_row_ptr,
    norm_weight_ptr,
    target,  # QuantizedRow
    factor,
    step,
    k,
    begin,
    end,
    NORM: tl.constexpr,
    DIGITS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    GATE: tl.constexpr = None,
):
    """Quantize the features begin : end of one row and store them at `target` (a QuantizedRow).

    `factor` and `step` are results of `row_quantization_step`. `end` is a multiple of GROUP, beyond k where the values are padded.
    """
    for start in range(begin, end, CHUNK):
        _, weighted = row_values(x_row_ptr, norm_weight_ptr, start + tl.arange(0, CHUNK), k, NORM, GATE)
        store_quantized(weighted * (factor / step), target, start, end, DIGITS, GROUP, CHUNK, True)


@triton.jit
def store_quantized(units, target, start, end, DIGITS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, CLAMPED: tl.constexpr):
    """Round `units` [CHUNK], the features from `start` on in units of the step, and store those before `end` at `target` (a QuantizedRow).

    CLAMPED: units may exceed the largest value, as those of a static step do.
    """
    cols = start + tl.arange(0, CHUNK)
    target_ptr = target.values_ptr + cols
    if DIGITS == 2:
        units = round_half_even(tl.minimum(tl.maximum(units, -32258.0), 32258.0))
        coarse = round_half_even(units / 254.0)
        fine = units - coarse * 254.0
        tl.store(target_ptr, coarse.to(tl.int8), mask=cols < end)
        tl.store(target_ptr + target.fine_offset, fine.to(tl.int8), mask=cols < end)
        if target.group_sums_ptr is not None:
            group = start // GROUP + tl.arange(0, CHUNK // GROUP)
            sums = tl.sum(tl.reshape(units, (CHUNK // GROUP, GROUP)), 1)
            tl.store(target.group_sums_ptr + group * target.stride_group, sums, mask=group * GROUP < end)
    else:
        tl.store(target_ptr, round_to(units, target.values_ptr.dtype.element_ty, CLAMPED), mask=cols < end)


@triton.jit
def round_to(units, DTYPE: tl.constexpr, CLAMPED: tl.constexpr = True):
    """The nearest values of DTYPE: int8, clamped to ± 127, or float8_e4m3fn, clamped to ± 448 if CLAMPED."""
    if DTYPE == tl.int8:  # noqa: SIM300
        return round_half_even(tl.minimum(tl.maximum(units, -127.0), 127.0)).to(tl.int8)
    elif not CLAMPED:
        return units.to(DTYPE)
    else:
        return tl.minimum(tl.maximum(units, -448.0), 448.0).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    # Pointers
    x_ptr,  # [M, k], or with GATE [M, 2 × k]; [tokens, k] with an order
    norm_weight_ptr,  # [k] or None
    input_scale_ptr,  # float32 [1]: a static scale, or None
    order_ptr,  # int32 [M]: row c is row order[c] / TOP_K of x; None: row c of x
    values_ptr,  # [DIGITS × M, padded_k]
    scale_ptr,  # float32 [M]
    group_sums_ptr,  # float32 [padded_k / GROUP, M] or None
    # Sizes
    num_rows,  # M
    k,
    padded_k,
    stride_x,
    eps,
    # Constants
    NORM: tl.constexpr,
    DIGITS: tl.constexpr,  # 2: coarse and fine digits; 1: one value per feature
    LIMIT: tl.constexpr,  # the largest value
    GROUP: tl.constexpr,  # features of a group; 1: no group sums
    GATE: tl.constexpr,  # an activation or None
    TOP_K: tl.constexpr,
    SLABS: tl.constexpr,  # rows of a slab of digits, or 0: the fine digits of all rows follow the coarse ones
    CHUNK: tl.constexpr,  # features that the threads load at a time
    NUM_CHUNKS: tl.constexpr,  # chunks of a row that stays in registers, or 0: the row is read twice
    USE_PDL: tl.constexpr,
):
    """One CTA: quantize one of `num_rows` rows. LIMIT is the largest quantized value; DIGITS is 1 or 2; GROUP > 0 adds sums of groups."""
    row = tl.program_id(0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    x_row = row
    if order_ptr is not None:
        x_row = tl.load(order_ptr + row) // TOP_K
    x_row_ptr = x_ptr + x_row.to(tl.int64) * stride_x
    row_sums_ptr = group_sums_ptr
    if group_sums_ptr is not None:
        row_sums_ptr = group_sums_ptr + row
    if SLABS > 0:
        values_row_ptr = values_ptr + (row // SLABS * (DIGITS * SLABS) + row % SLABS).to(tl.int64) * padded_k
        fine_offset = tl.cast(SLABS, tl.int64) * padded_k
    else:
        values_row_ptr = values_ptr + row.to(tl.int64) * padded_k
        fine_offset = tl.cast(num_rows, tl.int64) * padded_k
    target = QuantizedRow(values_row_ptr, fine_offset, row_sums_ptr, num_rows)
    if NUM_CHUNKS > 0:
        squares = tl.zeros([CHUNK], tl.float32)
        largest = tl.zeros([CHUNK], tl.float32)
        chunks = ()
        for i in tl.static_range(NUM_CHUNKS):
            x, weighted = row_values(x_row_ptr, norm_weight_ptr, i * CHUNK + tl.arange(0, CHUNK), k, NORM, GATE)
            largest = tl.maximum(largest, tl.abs(weighted), propagate_nan=tl.PropagateNan.ALL)
            if NORM:
                squares += x * x
                chunks = chunks + (weighted,)  # noqa: RUF005 - Triton does not unpack tuples
            else:
                chunks = chunks + (weighted.to(x_ptr.dtype.element_ty),)  # noqa: RUF005 - exact
        if not NORM:
            squares = largest  # NaN where a feature is NaN
        factor, step = quantization_step(tl.sum(squares, 0), tl.max(largest, 0), input_scale_ptr, k, eps, NORM, LIMIT)
        IS_STATIC: tl.constexpr = input_scale_ptr is not None
        multiplier = factor / step
        if not IS_STATIC:
            multiplier *= 0.9999996  # rounding makes no value exceed LIMIT units, so that values need no clamp
        for i in tl.static_range(NUM_CHUNKS):
            store_quantized(chunks[i].to(tl.float32) * multiplier, target, i * CHUNK, padded_k, DIGITS, GROUP, CHUNK, IS_STATIC)
    else:
        factor, step = row_quantization_step(x_row_ptr, norm_weight_ptr, input_scale_ptr, k, eps, NORM, LIMIT, CHUNK, GATE)
        quantize_row(x_row_ptr, norm_weight_ptr, target, factor, step, k, 0, padded_k, NORM, DIGITS, GROUP, CHUNK, GATE)
    tl.store(scale_ptr + row, step)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_groups_kernel(
    x_ptr,  # [M, k]
    values_ptr,  # float8_e4m3fn [M, padded_k]
    scale_ptr,  # float32 [padded_k / GROUP, M]
    num_rows,  # M
    k,
    padded_k,
    stride_x,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,  # features of one CTA
    USE_PDL: tl.constexpr,
):
    """One CTA: quantize CHUNK features of one row to float8_e4m3fn, with a scale per GROUP features."""
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    group = tl.program_id(1) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < k, other=0.0).to(tl.float32)  # [groups of the chunk, GROUP]
    step = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12) + tl.sum(x, 1) * 0.0  # NaN where a feature is NaN
    tl.store(scale_ptr + group.to(tl.int64) * num_rows + row, step, mask=group * GROUP < padded_k)
    target_ptr = values_ptr + row * padded_k + cols
    tl.store(target_ptr, round_to(tl.div_rn(x, step[:, None]), values_ptr.dtype.element_ty), mask=cols < padded_k)


def empty_activations(x: Tensor, form: str, padded_k: int, group: int = 0, num_rows: int | None = None) -> QuantizedActivations:
    """Uninitialized memory for x [M, K], or `num_rows` rows, quantized as `form`, with group sums of digits if `group` > 0."""
    m, is_digits = len(x) if num_rows is None else num_rows, form == "digits"
    rows = cdiv(m, _SLAB_ROWS) * 2 * _SLAB_ROWS if form == "slabs" else m * (2 if is_digits else 1)
    values = torch.empty((rows, padded_k), dtype=torch.float8_e4m3fn if form == "fp8" else torch.int8, device=x.device)
    group_sums = None
    if is_digits and group:
        group_sums = torch.empty((cdiv(padded_k, group), m), dtype=torch.float32, device=x.device)
    return QuantizedActivations(values, torch.empty(m, dtype=torch.float32, device=x.device), group_sums)


def quantize_rows(
    x: Tensor,
    form: str,
    padded_k: int,
    group: int = 0,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    input_scale: Tensor | None = None,
    gate: str | None = None,
    order: Tensor | None = None,
    top_k: int = 1,
) -> QuantizedActivations:
    """x [M, K] quantized with a scale per row, after an RMS norm when there is `norm_weight`.

    `form` is "fp8", "int8", "digits" or "slabs". With digits and `group` > 0, the sums over each `group` features are stored, too. With
    `gate`, x is [M, 2 × K]: gates, then the values that act(gate) multiplies. `input_scale` replaces the scale per row.
    With `order`, int32, the result has a row for each element of it: row c is row order[c] ÷ `top_k`, rounded down, of x.
    """
    m = x.shape[0] if order is None else len(order)
    result = empty_activations(x, form, padded_k, group, m)
    row_features = max(next_power_of_2(padded_k), 2 * group, 128)
    is_in_registers = row_features <= _MAX_ROW_IN_REGISTERS
    features_per_thread = 64 if gate else 16
    num_warps = min(16, max(1, (row_features if is_in_registers else _CHUNK) // (32 * features_per_thread)))
    # A thread loads 8 features at a time, 16 bytes of a 16-bit row.
    chunk = min(row_features, max(256 * num_warps, 2 * group)) if is_in_registers else _CHUNK
    if m:
        quantize_rows_kernel[(m,)](
            x,
            norm_weight,
            input_scale,
            order,
            result.values,
            result.scale,
            result.group_sums,
            m,
            x.shape[1] // (2 if gate else 1),
            padded_k,
            x.stride(0),
            eps,
            NORM=norm_weight is not None,
            DIGITS=2 if form in ("digits", "slabs") else 1,
            LIMIT=LARGEST_VALUES[form],
            GROUP=max(group, 1),
            GATE=gate,
            TOP_K=top_k,
            SLABS=_SLAB_ROWS if form == "slabs" else 0,
            CHUNK=chunk,
            NUM_CHUNKS=cdiv(padded_k, chunk) if is_in_registers else 0,
            num_warps=num_warps,
            maxnreg=_MAX_REGISTERS if gate and norm_weight is None and num_warps == 16 else None,
            **pdl_launch_options(x),
        )
    return result


def quantize_groups(x: Tensor, group: int) -> QuantizedActivations:
    """x [M, K] quantized to float8_e4m3fn with a scale for each `group` neighbouring features (a power of two): scale [groups, M]."""
    rows, k = x.shape
    groups = cdiv(k, group)
    values = torch.empty((rows, groups * group), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    chunk = max(group, min(2048, next_power_of_2(k)))
    if rows:
        quantize_groups_kernel[(rows, cdiv(k, chunk))](
            x, values, scale, rows, k, groups * group, x.stride(0), GROUP=group, CHUNK=chunk, num_warps=4, **pdl_launch_options(x)
        )
    return QuantizedActivations(values, scale)
