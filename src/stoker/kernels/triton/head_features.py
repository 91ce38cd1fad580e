"""The heads of a token in registers: loads, norms, rotation, transform and quantization, for the kernels that rotate and store them.

A tile of heads is three tensors, its rotary parts: the first and the second features of the pairs that rotate together, and the features
that do not rotate. The even and odd features of `attention.paired_8bit` are other parts. `rope` says what is computed; its kernels and
`attention.new_token_8bit` consist of these functions.
"""

from __future__ import annotations

from functools import cache as cached
from typing import NamedTuple

import triton
import triton.language as tl

from stoker.kernels.reference.rope import power_of_2_divisor
from stoker.kernels.triton.hadamard import hadamard_blocks
from stoker.kernels.triton.integers import next_power_of_2


class HeadFeatures(NamedTuple):
    """Constants: the features of a head. The first 2 × half rotate; the rest is copied, or transformed by itself."""

    size: int
    value_size: int  # 0: the cache has no values
    half: int
    interleaved: bool
    block_half: int  # half, rounded up to a power of two
    block_rest: int  # size - 2 × half, likewise
    block_value: int  # value_size, likewise
    hadamard_half: int  # the largest power of two that divides half: the block size of its Hadamard transform
    hadamard_rest: int  # of size - 2 × half
    norm_eps: float | None  # of the RMS norms of q and k; None: they have none


@cached
def head_features(size: int, value_size: int, half: int, interleaved: bool, norm_eps: float | None = None) -> HeadFeatures:
    """The constants FEATURES: the sizes of a head's parts, rounded up to powers of two for tiles."""
    rest = size - 2 * half
    blocks = [next_power_of_2(max(n, 1)) for n in (half, rest, value_size)]
    return HeadFeatures(size, value_size, half, interleaved, *blocks, power_of_2_divisor(half), power_of_2_divisor(rest), norm_eps)


@triton.jit
def quantize(x, scale, DTYPE: tl.constexpr):
    """x ÷ scale rounded to the nearest value of int8 (ties to even) or float8_e4m3fn, clamped to its range.

    The quotient is a product with 1 ÷ scale, computed once per head, plus the product of its remainder, which rounds it as a division
    does: 3 instructions instead of 12 and a call for unusual exponents. x is clamped before, so that the remainder is finite.
    """
    x = x.to(tl.float32)
    inverse = 1.0 / scale
    largest = scale * (127.0 if DTYPE == tl.int8 else 448.0)  # noqa: SIM300
    x = tl.minimum(tl.maximum(x, -largest), largest)
    units = x * inverse
    units = tl.fma(tl.fma(units, -scale, x), inverse, units)
    if DTYPE == tl.int8:  # noqa: SIM300
        # Adding 1.5 × 2^23 leaves no fraction bits: the sum is rounded to an integer, to even on a tie.
        return ((units + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return units.to(DTYPE)


@triton.jit
def store_as_cache(target_ptr, offsets, x, scale, inside):
    """Store x in the dtype of the target: quantized by `scale` for an 8-bit cache, otherwise converted."""
    if target_ptr.dtype.element_ty.primitive_bitwidth == 8:
        tl.store(target_ptr + offsets, quantize(x, scale, target_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(target_ptr + offsets, x.to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_scale(scale_ptr, heads, inside, EARLY: tl.constexpr = False):
    """The scale of each head, or 1 without scales."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + heads, mask=inside, other=1.0, volatile=EARLY)


@triton.jit
def load_pairs(source_ptr, offsets, inside, FEATURES: tl.constexpr, EARLY: tl.constexpr = False):
    """(first, second), each [heads, block_half] in the dtype of the source: the pairs of features that are rotated together.

    `offsets` and `inside` are [heads, 1].
    """
    HALF: tl.constexpr = FEATURES.half
    if FEATURES.interleaved:
        WIDTH: tl.constexpr = FEATURES.block_half
        cols = tl.arange(0, 2 * WIDTH)[None, :]
        x = tl.load(source_ptr + offsets + cols, mask=inside & (cols < 2 * HALF), other=0.0, volatile=EARLY)
        return tl.split(tl.reshape(x, (x.shape[0], WIDTH, 2)))
    else:
        pair = tl.arange(0, FEATURES.block_half)[None, :]
        first = tl.load(source_ptr + offsets + pair, mask=inside & (pair < HALF), other=0.0, volatile=EARLY)
        second = tl.load(source_ptr + offsets + HALF + pair, mask=inside & (pair < HALF), other=0.0, volatile=EARLY)
        return first, second


@triton.jit
def store_pairs(target_ptr, offsets, first, second, scale, inside, FEATURES: tl.constexpr):
    """The inverse of `load_pairs`: store the pairs in the dtype of the target, quantized by `scale` for an 8-bit cache."""
    HALF: tl.constexpr = FEATURES.half
    if FEATURES.interleaved:
        WIDTH: tl.constexpr = FEATURES.block_half
        cols = tl.arange(0, 2 * WIDTH)[None, :]
        x = tl.reshape(tl.join(first, second), (first.shape[0], 2 * WIDTH))
        store_as_cache(target_ptr, offsets + cols, x, scale, inside & (cols < 2 * HALF))
    else:
        pair = tl.arange(0, FEATURES.block_half)[None, :]
        store_as_cache(target_ptr, offsets + pair, first, scale, inside & (pair < HALF))
        store_as_cache(target_ptr, offsets + HALF + pair, second, scale, inside & (pair < HALF))


@triton.jit
def load_features(
    source_ptr, offsets, inside, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr = False
):  # fmt: skip
    """Load features BEGIN : END of several heads, as [heads, WIDTH] in the dtype of the source, with zeros from END on.

    `offsets` [heads, 1] is where each head begins. Heads outside of the mask `inside` [heads, 1] are zeros. For features that are not
    rotated, and for factors and means; `load_pairs` loads the rotated features.
    """
    cols = BEGIN + tl.arange(0, WIDTH)[None, :]
    return tl.load(source_ptr + offsets + cols, mask=inside & (cols < END), other=0.0, volatile=EARLY)


@triton.jit
def store_features(target_ptr, offsets, x, scale, inside, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `load_features`: store x in the dtype of the target, quantized by `scale` for an 8-bit cache."""
    cols = BEGIN + tl.arange(0, WIDTH)[None, :]
    store_as_cache(target_ptr, offsets + cols, x, scale, inside & (cols < END))


@triton.jit
def load_rotary_parts(source_ptr, offsets, inside, FEATURES: tl.constexpr, EARLY: tl.constexpr = False):
    """(first, second, rest) of several heads, in the dtype of the source.

    `first` and `second` are pairs of features (`load_pairs`), `rest` the features that are not rotated. A part without features is another
    name of one that has some. `offsets` and `inside` are [heads, 1].
    """
    HALF: tl.constexpr = FEATURES.half
    SIZE: tl.constexpr = FEATURES.size
    if HALF > 0:
        first, second = load_pairs(source_ptr, offsets, inside, FEATURES, EARLY)
    if SIZE > 2 * HALF:
        rest = load_features(source_ptr, offsets, inside, 2 * HALF, SIZE, FEATURES.block_rest, EARLY)
    if HALF == 0:
        first, second = rest, rest
    if SIZE == 2 * HALF:
        rest = first
    return first, second, rest


@triton.jit
def store_rotary_parts(target_ptr, offsets, parts, scale, inside, FEATURES: tl.constexpr):
    """The inverse of `load_rotary_parts`: store the parts in the dtype of the target, quantized by `scale` for an 8-bit cache."""
    HALF: tl.constexpr = FEATURES.half
    SIZE: tl.constexpr = FEATURES.size
    if HALF > 0:
        store_pairs(target_ptr, offsets, parts[0], parts[1], scale, inside, FEATURES)
    if SIZE > 2 * HALF:
        store_features(target_ptr, offsets, parts[2], scale, inside, 2 * HALF, SIZE, FEATURES.block_rest)


@triton.jit
def load_norm(norm_ptr, head, inside, FEATURES: tl.constexpr, EARLY: tl.constexpr):
    """The parts of the weight of a norm, for each row. Three times 1 without a weight or a norm."""
    if norm_ptr is None or FEATURES.norm_eps is None:
        return 1.0, 1.0, 1.0
    else:
        return load_rotary_parts(norm_ptr, head * 0, inside, FEATURES, EARLY)


@triton.jit
def normalized(parts, weights, FEATURES: tl.constexpr):
    """The parts in float32, after the norm of FEATURES if it has one.

    A normed feature is rounded to the dtype of the heads, as the result of a norm of its own is.
    """
    HALF: tl.constexpr = FEATURES.half
    SIZE: tl.constexpr = FEATURES.size
    DTYPE: tl.constexpr = parts[0].dtype
    first, second, rest = parts[0].to(tl.float32), parts[1].to(tl.float32), parts[2].to(tl.float32)
    if FEATURES.norm_eps is not None:
        if HALF == 0:
            squares = tl.sum(rest * rest, axis=1)
        else:
            squares = tl.sum(first * first + second * second, axis=1)
            if SIZE > 2 * HALF:
                squares += tl.sum(rest * rest, axis=1)
        factor = (1.0 / tl.sqrt(squares / SIZE + FEATURES.norm_eps))[:, None]
        first = (first * factor * weights[0]).to(DTYPE).to(tl.float32)
        second = (second * factor * weights[1]).to(DTYPE).to(tl.float32)
        rest = (rest * factor * weights[2]).to(DTYPE).to(tl.float32)
    return first, second, rest


@triton.jit
def load_angles(cos_sin_ptr, position, FEATURES: tl.constexpr, EARLY: tl.constexpr = False):
    """(cosines, sines) of positions [rows, 1], each float32 [rows, block_half]. 1 and 1 if no feature rotates."""
    if FEATURES.half == 0:
        return 1.0, 1.0
    else:
        pair = tl.arange(0, FEATURES.block_half)[None, :]
        row_ptr = cos_sin_ptr + position.to(tl.int64) * (2 * FEATURES.half)
        cos = tl.load(row_ptr + pair, mask=pair < FEATURES.half, other=0.0, volatile=EARLY)
        sin = tl.load(row_ptr + FEATURES.half + pair, mask=pair < FEATURES.half, other=0.0, volatile=EARLY)
        return cos, sin


@triton.jit
def rotated(parts, angles, FEATURES: tl.constexpr):
    """The parts (float32) with the pairs of features rotated."""
    if FEATURES.half == 0:
        return parts
    else:
        first, second = parts[0] * angles[0] - parts[1] * angles[1], parts[1] * angles[0] + parts[0] * angles[1]
        return first, second, parts[2]


@triton.jit
def load_factors(balance_ptr, offsets, inside, FEATURES: tl.constexpr, EARLY: tl.constexpr):
    """The parts of the factors of `key_balance`, times those that make the transform orthonormal. Three times 1 without a balance."""
    if balance_ptr is None:
        return 1.0, 1.0, 1.0
    else:
        first, second, rest = load_rotary_parts(balance_ptr, offsets, inside, FEATURES, EARLY)
        OF_PAIRS: tl.constexpr = (0.5 / FEATURES.hadamard_half) ** 0.5
        OF_REST: tl.constexpr = (1.0 / FEATURES.hadamard_rest) ** 0.5
        return first * OF_PAIRS, second * OF_PAIRS, rest * OF_REST


@triton.jit
def transformed(parts, factors, FEATURES: tl.constexpr):
    """The parts (float32) times their factors, after the transform `reference.rope.hadamard_transform`.

    It applies a Hadamard transform to each of three vectors: the sums of all pairs, their differences, and the features that do not rotate.
    """
    if FEATURES.half > 0:
        first, second = parts[0] * factors[0], parts[1] * factors[1]
        plus = hadamard_blocks(first + second, FEATURES.hadamard_half)
        minus = hadamard_blocks(first - second, FEATURES.hadamard_half)
    if FEATURES.size > 2 * FEATURES.half:
        rest = hadamard_blocks(parts[2] * factors[2], FEATURES.hadamard_rest)
    if FEATURES.half == 0:
        plus, minus = rest, rest
    if FEATURES.size == 2 * FEATURES.half:
        rest = plus
    return plus, minus, rest


@triton.jit
def prepared(parts, weights, angles, factors, balance_ptr, FEATURES: tl.constexpr):
    """The parts (float32) as attention multiplies them: after norm and rotation and, unless `balance_ptr` is None, the transform."""
    parts = normalized(parts, weights, FEATURES)
    parts = rotated(parts, angles, FEATURES)
    if balance_ptr is not None:
        parts = transformed(parts, factors, FEATURES)
    return parts


@triton.jit
def less_mean(parts, mean, scale):
    """The parts (float32) of keys less their mean, which is stored in units of the cache's `scale`."""
    return parts[0] - mean[0] * scale, parts[1] - mean[1] * scale, parts[2] - mean[2] * scale


@triton.jit
def page_offset(slot, BLOCK_SIZE: tl.constexpr, stride_block, SIZE: tl.constexpr):
    """int64: where the page of head 0 holds `slot`, in elements from the begin of the cache."""
    return (slot // BLOCK_SIZE).to(tl.int64) * stride_block + slot % BLOCK_SIZE * SIZE
