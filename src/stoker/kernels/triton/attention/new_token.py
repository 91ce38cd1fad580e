"""The token that a decode row adds: rotated and stored by the programs that attend for it, which saves a step one launch a layer.

Every program of a row rotates its own queries. Only a row's last split sees the new key, so its programs store it themselves before
they read keys: all programs that share a head of keys store the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.query_tile import load_part, store_part


@triton.constexpr_function
def run_of(half):
    """How many features from a multiple of so many on have partners one after another: as wide as loads may be."""
    return min(half & -half, 8)


@triton.jit
def factors(angles, FIRST: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What WIDTH features from FIRST on, and their partners, are multiplied by, float32 [1, WIDTH] each: those that do not rotate 1 and 0.

    `angles`: HALF cosines, then as many sines. Read at once, though the launch before may still run.
    """
    col = FIRST + tl.arange(0, WIDTH)[None, :]
    turns = col < 2 * HALF
    if INTERLEAVED:
        is_second = col % 2 == 1
        pair = col // 2
    else:
        is_second = col >= HALF
        pair = tl.where(is_second, col - HALF, col)
    cos = tl.load(angles + pair, mask=turns, other=1.0, volatile=True)
    sin = tl.load(angles + HALF + pair, mask=turns, other=0.0, volatile=True)
    return cos, tl.where(is_second, sin, -sin)


@triton.jit
def rotated_part(
    rows, cos, sin, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """`load_part`, its features below 2 × HALF rotated by their `factors`; float32 where any is."""
    x = load_part(rows, FIRST, WIDTH, SIZE, inside)
    if FIRST >= 2 * HALF:
        return x
    else:
        col = FIRST + tl.arange(0, WIDTH)
        if INTERLEAVED:
            partner = col ^ 1
        else:
            RUN: tl.constexpr = run_of(HALF)
            partner = tl.max_contiguous(tl.multiple_of(tl.where(col < HALF, col + HALF, col - HALF), RUN), RUN)
        other = tl.load(rows[:, None] + partner[None, :], mask=inside[:, None] & (col < 2 * HALF)[None, :], other=0.0)
        return x.to(tl.float32) * cos + other.to(tl.float32) * sin


@triton.jit
def store_new(
    keys, values, cos1, sin1, cos2, sin2, key_row, value_row, mine, SIZE: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PART1: tl.constexpr, VALUE_PART2: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write one head's key, rotated, and its value where they belong in the cache, if they are `mine`. Its `factors` come in two parts."""
    one = tl.zeros([1], tl.int64)
    inside = mine & (tl.arange(0, 1) == 0)
    k1 = rotated_part(keys + one, cos1, sin1, inside, 0, PART1, SIZE, HALF, INTERLEAVED)
    v1 = load_part(values + one, 0, VALUE_PART1, VALUE_SIZE, inside)
    if PART2 > 0:
        k2 = rotated_part(keys + one, cos2, sin2, inside, PART1, PART2, SIZE, HALF, INTERLEAVED)
    if VALUE_PART2 > 0:
        v2 = load_part(values + one, VALUE_PART1, VALUE_PART2, VALUE_SIZE, inside)
    store_part(key_row + one, k1, 0, PART1, SIZE, inside)
    store_part(value_row + one, v1, 0, VALUE_PART1, VALUE_SIZE, inside)
    if PART2 > 0:
        store_part(key_row + one, k2, PART1, PART2, SIZE, inside)
    if VALUE_PART2 > 0:
        store_part(value_row + one, v2, VALUE_PART1, VALUE_PART2, VALUE_SIZE, inside)
