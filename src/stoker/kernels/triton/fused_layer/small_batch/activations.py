"""The activations that the small-batch kernel multiplies: normalized, quantized, and stored in shared memory.

Every CTA does this for all tokens at the beginning of every linear, from what all CTAs stored (5.4 µs per layer and token of int4 on an
H200, 2.2 of fp8 and 1 of bfloat16, which limits the number of tokens). Layouts: `config`.

An int8 activation has two digits, x ≈ step × (254 × coarse + fine) with coarse and fine in -127 … 127, so 16 bits of precision with 8-bit
products. For int4, `group_sums` of the integers 254 × coarse + fine multiply the zero of each group.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.small_batch.config import activation_bytes, digit_distance, group_sum_bytes, is_16bit, padded_width
from stoker.kernels.triton.ptx.shared import store_shared_bytes, store_shared_float, store_shared_halves


@gluon.jit
def round_in_fraction(x):
    """x + 1.5 × 2^23: a float32 whose low fraction bits are x rounded to the nearest integer, ties to even, for |x| < 2^22."""
    return x + 12582912.0


@gluon.jit
def load_token(linear, token, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """The input x of linear `linear` for one token: [WIDTH], zeros from k on. Read through L2 (cg), because other CTAs stored it."""
    cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    return gl.load(linear.x_ptr + token * linear.k + cols, mask=cols < linear.k, other=0.0, cache_modifier=".cg")


@gluon.jit
def store_16bit(linear, row, norm_weight, address, NORMED: gl.constexpr, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """Store one token's input as 16-bit values at shared address `address`, after the RMS norm if NORMED.

    `row` is a result of `load_token`.
    """
    WIDTH: gl.constexpr = padded_width(CONFIG, INDEX)
    FEATURES: gl.constexpr = CONFIG.features[INDEX]
    cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [CONFIG.num_warps], [0]))
    v = row.to(gl.float32)
    if NORMED:
        v *= norm_weight.to(gl.float32) * gl.rsqrt(gl.sum(v * v, 0) / linear.k + linear.norm_eps)
    # Zeros beyond the features all go to the padding.
    store_shared_halves(address + 2 * gl.minimum(cols, FEATURES), v.to(gl.bfloat16 if CONFIG.format == "bfloat16" else gl.float16))


@gluon.jit
def sum_and_max(sum, largest, other_sum, other_largest):
    """Combine two (sum, maximum) pairs: the function of one `gl.reduce`."""
    return sum + other_sum, gl.maximum(largest, other_largest)


@gluon.jit
def quantize_token(linear, row, norm_weight, address, group_sums, NORMED: gl.constexpr, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """Store one token's input, quantized, at shared address `address`, after the RMS norm if NORMED. Returns the real value of one unit.

    For int4, the sum of each group's integers is stored at `group_sums`. The norm and the largest magnitude come from one reduction: the
    unit is max |x × weight| × rsqrt(mean(x²) + eps) ÷ the largest integer.
    """
    k = linear.k
    WIDTH: gl.constexpr = padded_width(CONFIG, INDEX)
    WARPS: gl.constexpr = CONFIG.num_warps
    GROUP_SIZE: gl.constexpr = CONFIG.group_size
    LARGEST: gl.constexpr = 448.0 if CONFIG.format == "fp8" else 127.0 * 254.0
    cols = gl.arange(0, WIDTH, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    v = row.to(gl.float32)
    weighted = v
    factor = 1.0
    if NORMED:
        weighted = v * norm_weight.to(gl.float32)
        sums, largest = gl.reduce((v * v, gl.abs(weighted)), 0, sum_and_max)
        factor = gl.rsqrt(sums / k + linear.norm_eps)
    else:
        sums, largest = gl.reduce((v, gl.abs(v)), 0, sum_and_max)
    # + sums × 0: a maximum ignores NaN, a sum does not.
    step = gl.maximum(largest * factor / LARGEST, 1e-12 if CONFIG.format == "fp8" else 1e-30) + sums * 0.0
    units = weighted * (factor / step)
    if CONFIG.format == "fp8":
        store_shared_bytes(address + cols, units.to(gl.float8e4nv).to(gl.int8, bitcast=True), 4)  # with 8 per store registers spill
    else:
        units = round_in_fraction(units) - 12582912.0
        coarse = round_in_fraction(units * (1.0 / 254.0))
        fine = round_in_fraction(units - (coarse - 12582912.0) * 254.0)
        place = cols
        if GROUP_SIZE == 32:
            # Of each pair of groups of 32, a lane's 8 features of the first and of the second lie side by side: one 16-byte load.
            place = cols // 64 * 64 + cols // 8 % 4 * 16 + cols // 32 % 2 * 8 + cols % 8
        store_shared_bytes(address + place, coarse.to(gl.int32, bitcast=True).to(gl.int8), 8)
        store_shared_bytes(address + digit_distance(CONFIG, INDEX) + place, fine.to(gl.int32, bitcast=True).to(gl.int8), 8)
        if GROUP_SIZE > 0:
            of_groups = gl.sum(gl.reshape(units, [WIDTH // GROUP_SIZE, GROUP_SIZE]), 1)
            group = gl.arange(0, WIDTH // GROUP_SIZE, layout=of_groups.type.layout)
            store_shared_float(group_sums + group * 4, of_groups, group >= 0)
    return step


@gluon.jit
def store_activations(linear, norm_weight, address, group_sums, NORMED: gl.constexpr, INDEX: gl.constexpr, CONFIG: gl.constexpr):
    """Store the inputs of all tokens for linear number INDEX in shared memory. Returns the unit of each token (1 for 16-bit weights).

    `linear` are its `LinearArgs`; `address` and `group_sums` are the shared addresses of the activations and of their sums by group. The
    next token is loaded before the current one is processed.
    """
    WIDTH: gl.constexpr = padded_width(CONFIG, INDEX)
    TOKENS: gl.constexpr = CONFIG.num_tokens
    steps = ()
    row = load_token(linear, 0, WIDTH, CONFIG.num_warps)
    for token in gl.static_range(TOKENS):
        next_row = row
        if token + 1 < TOKENS:
            next_row = load_token(linear, token + 1, WIDTH, CONFIG.num_warps)
        target = address + token * activation_bytes(CONFIG, INDEX)
        if is_16bit(CONFIG):
            store_16bit(linear, row, norm_weight, target, NORMED, INDEX, CONFIG)
            steps = steps + (1.0,)
        else:
            sums = group_sums + token * group_sum_bytes(CONFIG, INDEX)
            steps = steps + (quantize_token(linear, row, norm_weight, target, sums, NORMED, INDEX, CONFIG),)
        row = next_row
    return steps
