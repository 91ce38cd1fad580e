"""The new token of each decode row over a cache of the queries' dtype: rotated and stored by the CTAs that attend for it.

This saves one launch per layer (1.2 µs). `new_token_8bit` does the same for 8-bit caches.

Without this, `rope_store` normalizes and rotates queries and keys and writes the cache in a launch of its own. Here every CTA of a row
does so with its own queries. Only the last split of a row sees the new key, so its CTAs store the key and the value before they read keys;
all CTAs that share a KV head store the same bytes.

    interleaved:      feature 2i pairs with 2i + 1          rotated = x × cos + partner × sin'
    else:             feature i pairs with i + half         with sin' = -sin for the first of a pair, +sin for the second
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.key_tile import load_part, store_part


@triton.constexpr_function
def partner_run(half):
    """The width of aligned runs of features whose rotation partners are neighbours, too: how many features one load can cover, up to 8.

    `half` is the number of rotated pairs. Constexpr.
    """
    return min(half & -half, 8)


@triton.jit
def rotary_factors(cos_sin_row_ptr, FIRST: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """(cos, sin'), each float32 [1, WIDTH]: the factors of features FIRST : FIRST + WIDTH and of their partners.

    They are 1 and 0 for features that are not rotated. `cos_sin_row_ptr` points to `half` cosines, then `half` sines. The loads are
    volatile, so that they stay before the following `pdl_wait`.
    """
    col = FIRST + tl.arange(0, WIDTH)[None, :]
    turns = col < 2 * FEATURES.half
    if FEATURES.interleaved:
        is_second = col % 2 == 1
        pair = col // 2
    else:
        is_second = col >= FEATURES.half
        pair = tl.where(is_second, col - FEATURES.half, col)
    cos = tl.load(cos_sin_row_ptr + pair, mask=turns, other=1.0, volatile=True)
    sin = tl.load(cos_sin_row_ptr + FEATURES.half + pair, mask=turns, other=0.0, volatile=True)
    return cos, tl.where(is_second, sin, -sin)


@triton.jit
def partners(FIRST: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """[WIDTH]: the features that rotate with features FIRST : FIRST + WIDTH. Meaningless for those that are not rotated."""
    col = FIRST + tl.arange(0, WIDTH)
    if FEATURES.interleaved:
        return col ^ 1
    else:
        RUN: tl.constexpr = partner_run(FEATURES.half)
        return tl.max_contiguous(tl.multiple_of(tl.where(col < FEATURES.half, col + FEATURES.half, col - FEATURES.half), RUN), RUN)


@triton.jit
def norm_weights(weight_ptr, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, FEATURES: tl.constexpr):
    """Each [1, WIDTH]: the weights of the norm of features FIRST : FIRST + WIDTH and of their partners. Volatile as in `rotary_factors`.

    1 for all if there are no weights, or if no feature has a partner.
    """
    if weight_ptr is None:
        return 1.0, 1.0
    else:
        col = FIRST + tl.arange(0, WIDTH)[None, :]
        own = tl.load(weight_ptr + col, mask=col < SIZE, other=0.0, volatile=True)
        if 2 * FEATURES.half <= FIRST:
            return own, 1.0
        else:
            partner = partners(FIRST, WIDTH, FEATURES)[None, :]
            return own, tl.load(weight_ptr + partner, mask=col < 2 * FEATURES.half, other=0.0, volatile=True)


@triton.jit
def norm_factor(rows, inside, SHAPE: tl.constexpr, FEATURES: tl.constexpr):
    """float32 [N, 1]: 1 / sqrt(mean(x²) + eps) of each head that `rows` [N] points to. 1 if there is no norm."""
    if FEATURES.norm_eps is None:
        return 1.0
    else:
        x = load_part(rows, 0, SHAPE.part1, SHAPE.size, inside).to(tl.float32)
        squares = tl.sum(x * x, axis=1)
        if SHAPE.part2 > 0:
            x = load_part(rows, SHAPE.part1, SHAPE.part2, SHAPE.size, inside).to(tl.float32)
            squares += tl.sum(x * x, axis=1)
        return (1.0 / tl.sqrt(squares / SHAPE.size + FEATURES.norm_eps))[:, None]


@triton.jit
def normalized_part(x, factor, weight, FEATURES: tl.constexpr):
    """x × factor × weight, rounded to the dtype of x, or x itself if there is no norm."""
    if FEATURES.norm_eps is None:
        return x
    else:
        return (x.to(tl.float32) * factor * weight).to(x.dtype)


@triton.jit
def load_rotated_part(
    rows,
    factor,  # `norm_factor` of the rows
    weights,  # `norm_weights` of the part
    angles,  # `rotary_factors` of the part
    inside,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """The result of `load_part` after the norm of heads, if there is one, with the features below 2 × half rotated.

    float32 when any of the features is rotated.
    """
    x = normalized_part(load_part(rows, FIRST, WIDTH, SIZE, inside), factor, weights[0], FEATURES)
    if 2 * FEATURES.half <= FIRST:
        return x
    else:
        partner = partners(FIRST, WIDTH, FEATURES)[None, :]
        turns = FIRST + tl.arange(0, WIDTH)[None, :] < 2 * FEATURES.half
        other = tl.load(rows[:, None] + partner, mask=inside[:, None] & turns, other=0.0)
        return x.to(tl.float32) * angles[0] + normalized_part(other, factor, weights[1], FEATURES).to(tl.float32) * angles[1]


@triton.jit
def store_new_token(
    new_key_ptr,  # one head's new key [size], not rotated
    new_value_ptr,  # its value [value_size]
    weights1,  # `norm_weights` of part 1 of the key
    weights2,  # of part 2
    angles1,  # `rotary_factors` of both parts
    angles2,
    key_page_ptr,  # where they go in the cache
    value_page_ptr,
    is_stored,  # False: store nothing
    SHAPE: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Normalize and rotate the new key of one head, and store it and its value in the cache if `is_stored`.

    Key and value are loaded completely before either is stored.
    """
    zero = tl.zeros([1], tl.int64)  # pointers of one row
    inside = is_stored & (tl.arange(0, 1) == 0)
    factor = norm_factor(new_key_ptr + zero, inside, SHAPE, FEATURES)
    k1 = load_rotated_part(new_key_ptr + zero, factor, weights1, angles1, inside, 0, SHAPE.part1, SHAPE.size, FEATURES)
    v1 = load_part(new_value_ptr + zero, 0, SHAPE.value_part1, SHAPE.value_size, inside)
    if SHAPE.part2 > 0:
        k2 = load_rotated_part(new_key_ptr + zero, factor, weights2, angles2, inside, SHAPE.part1, SHAPE.part2, SHAPE.size, FEATURES)
    if SHAPE.value_part2 > 0:
        v2 = load_part(new_value_ptr + zero, SHAPE.value_part1, SHAPE.value_part2, SHAPE.value_size, inside)
    store_part(key_page_ptr + zero, k1, 0, SHAPE.part1, SHAPE.size, inside)
    store_part(value_page_ptr + zero, v1, 0, SHAPE.value_part1, SHAPE.value_size, inside)
    if SHAPE.part2 > 0:
        store_part(key_page_ptr + zero, k2, SHAPE.part1, SHAPE.part2, SHAPE.size, inside)
    if SHAPE.value_part2 > 0:
        store_part(value_page_ptr + zero, v2, SHAPE.value_part1, SHAPE.value_part2, SHAPE.value_size, inside)
