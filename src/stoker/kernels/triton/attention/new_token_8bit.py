"""The new token of each decode row over an 8-bit cache, which saves the launch of `rope.rope_store` as `new_token` does for 16 bits.

The new key is one more row of the query tile, so that queries and key are normalized, rotated and transformed together, by the functions
and with the results of `rope_store`. No part of the tile is computed twice: of its M rows, at least 16, the heads of a group use a few.

    row             0 .. heads - 1                            heads                              heads + 1 .. M - 1
    head            a query head                              the new key of their KV head       zeros
    norm, factors   those of queries                          those of keys                      zeros
    result          rounded to the queries' dtype: operand    less its mean, quantized: stored   not used

Time, µs on an H200 over 1,000 keys of 8 KV heads: 5.7 with one row and 6.9 with two, where the launch of `rope_store` and attention take
6.9 and 8.5. The keys and values of one row need 0.5 at 4.28 TB/s: the time is the latency of dependent loads, products and the
combination of splits.

Only the last split of a row sees the new key, so its CTAs store it, and the value, before they read keys. The operand is in registers: the
even features of the tile and the odd ones (`paired_8bit`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.head_features import (
    head_scale,
    less_mean,
    load_angles,
    load_factors,
    load_features,
    load_norm,
    load_rotary_parts,
    page_offset,
    prepared,
    store_features,
    store_rotary_parts,
)
from stoker.kernels.triton.kv_pages import mean_tokens


@triton.jit
def load_tile_norm(new, is_query, is_key, FEATURES: tl.constexpr):
    """The parts of the norm's weight for each row of the tile. Three times 1 without a norm."""
    if FEATURES.norm_eps is None:
        return 1.0, 1.0, 1.0
    else:
        of_query = load_norm(new.q_norm_ptr, is_query.to(tl.int32), is_query, FEATURES, True)
        of_key = load_norm(new.k_norm_ptr, is_key.to(tl.int32), is_key, FEATURES, True)
        return (
            tl.where(is_key, of_key[0], of_query[0]),
            tl.where(is_key, of_key[1], of_query[1]),
            tl.where(is_key, of_key[2], of_query[2]),
        )


@triton.jit
def load_tile_constants(
    new,  # NewTokens
    cache,  # KVPages
    row,  # of the step
    kv_head,
    is_query,  # bool [M, 1]
    is_key,  # bool [M, 1]
    FEATURES: tl.constexpr,  # HeadFeatures
):
    """(weights, angles, factors, mean, scales): what rows of the tile are normalized, rotated and multiplied by, and what is subtracted.

    Each is a tuple of parts; `scales` are those of keys and values. No kernel of a step writes them: the loads are volatile, so that they
    stay before `pdl_wait`.
    """
    position = tl.load(new.positions_ptr + row, volatile=True) + is_key.to(tl.int32) * 0  # [M, 1]
    weights = load_tile_norm(new, is_query, is_key, FEATURES)
    angles = load_angles(new.cos_sin_ptr, position, FEATURES, True)
    factors_row = (kv_head * 2 + 1 - is_key.to(tl.int32)) * FEATURES.size
    factors = load_factors(new.key_balance_ptr, factors_row, is_query | is_key, FEATURES, True)
    mean = 0.0, 0.0, 0.0
    if cache.key_mean_ptr is not None:
        mean_row = kv_head * cache.stride_mean_head + position // mean_tokens() * FEATURES.size
        mean = load_rotary_parts(cache.key_mean_ptr, mean_row, is_key & (position > 0), FEATURES, True)  # 0 for queries
    scales = head_scale(cache.key_scale_ptr, kv_head, True, True), head_scale(cache.value_scale_ptr, kv_head, True, True)
    return weights, angles, factors, mean, scales


@triton.jit
def concatenated(x, y):
    """[M, 2 × N]: the columns of x [M, N], then those of y [M, N]."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def even_and_odd_features(parts, FEATURES: tl.constexpr):
    """(features 0, 2, 4 …, features 1, 3, 5 …) of heads in the order in which `store_rotary_parts` stores them, each [M, size / 2].

    The widths of the parts are powers of two: all features rotate, a half of them, or none.
    """
    if FEATURES.half == 0:
        x = parts[2]
    else:
        if FEATURES.interleaved:
            x = tl.reshape(tl.join(parts[0], parts[1]), (parts[0].shape[0], 2 * FEATURES.half))
        else:
            x = concatenated(parts[0], parts[1])
        if FEATURES.size > 2 * FEATURES.half:
            x = concatenated(x, parts[2])
    return tl.split(tl.reshape(x, (x.shape[0], FEATURES.size // 2, 2)))


@triton.jit
def load_tile(
    q_rows,  # [M]: pointers to the queries of the tile
    new,  # NewTokens
    row,  # of the step
    kv_head,
    is_query,  # bool [M, 1]
    is_key,  # bool [M, 1]
    FEATURES: tl.constexpr,  # HeadFeatures
):
    """The rotary parts, each [M, width of the part], of the queries of the tile and of the new key, in the dtype of the queries."""
    new_key_ptr = new.keys_ptr + row.to(tl.int64) * new.stride_key_token + kv_head * new.stride_key_head
    return load_rotary_parts(tl.where(is_key, new_key_ptr, q_rows[:, None]), 0, is_query | is_key, FEATURES)


@triton.jit
def queries_and_stored_token(
    parts,  # of `load_tile`
    new,  # NewTokens
    cache,  # KVPages
    constants,  # of `load_tile_constants`
    row,  # of the step
    kv_head,
    slot,
    is_stored,  # False: store nothing
    is_key,  # bool [M, 1]
    FEATURES: tl.constexpr,  # HeadFeatures
    BLOCK_SIZE: tl.constexpr,
):
    """Store the new key and value of one KV head if `is_stored`, and return the even and the odd features of the tile's queries.

    Other threads read what was stored after a barrier only.
    """
    weights, angles, factors, mean, scales = constants
    key_scale, value_scale = scales
    QUERY: tl.constexpr = parts[0].dtype
    VALUE: tl.constexpr = FEATURES.value_size
    new_value_ptr = new.values_ptr + row.to(tl.int64) * new.stride_value_token + kv_head * new.stride_value_head
    one_row = tl.zeros([1, 1], tl.int32)
    # The latency of the value overlaps with that of queries and key. A load for a later store is moved behind the transform by ptxas.
    if is_stored:
        value = load_features(new_value_ptr, one_row, one_row == 0, 0, VALUE, FEATURES.block_value)
        value_page = page_offset(slot, BLOCK_SIZE, cache.stride_value_block, VALUE) + kv_head * cache.stride_value_head
        store_features(cache.values_ptr, value_page + one_row, value, value_scale, one_row == 0, 0, VALUE, FEATURES.block_value)
    parts = prepared(parts, weights, angles, factors, new.key_balance_ptr, FEATURES)
    rounded = parts[0].to(QUERY), parts[1].to(QUERY), parts[2].to(QUERY)
    if is_stored:
        keys = rounded
        if new.key_balance_ptr is not None:
            keys = parts
            if cache.key_mean_ptr is not None:
                keys = less_mean(parts, mean, key_scale)
        key_page = page_offset(slot, BLOCK_SIZE, cache.stride_key_block, FEATURES.size) + kv_head * cache.stride_key_head
        store_rotary_parts(cache.keys_ptr, key_page + is_key.to(tl.int32) * 0, keys, key_scale, is_key, FEATURES)
    return even_and_odd_features(rounded, FEATURES)
