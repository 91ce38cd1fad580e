"""Paged attention of decode rows, which have one query token each, with the keys of a row split over CTAs (FlashDecoding).

For row r of `length` tokens, query head h and its KV head g = h // group:

    out[r, h] = Σ_j softmax_j(scale × q[r, h] · key[j, g]) × value[j, g]          j over the visible keys of row r

    q     [rows, num_heads, size]               key, value: in the paged cache, through the row's block table (`kv_pages`)
    out   [rows, num_heads, value_size]         float32 sums, the queries' dtype

Grid: axis 0 has one query tile per row and group of query heads, axis 1 the splits. A CTA attends with up to BLOCK_M query heads of one KV
head to its share of the row's keys, BLOCK_N at a time. The number of splits that a row uses depends on its length, which is read on the
device, so that one captured launch serves all lengths; CTAs of unused splits exit. With `split_tokens_ptr`, the same is true for the length
of a split, which the host chooses for the rows of each step.

    keys of a row     | tile | tile | tile | tile | tile | tile | tile |        a tile: BLOCK_N keys
    splits            |      split 0       |      split 1       | sp.2 |        each at least `min_tiles` tiles, or `split_tokens` keys
    combined          by counter or by flags (`split_combine`)

With `new`, the row's last token is not in the cache yet and its query has not been normalized and rotated: see `new_token`, and for 8-bit
caches `new_token_8bit`.

Theoretical floor: the bytes of the keys and values at the speed of memory. Reached on an H200 (32 / 8 heads of 128, read ceiling
4.42 TB/s): 256 rows × 1,000 keys 241 µs (98 %), 64 rows 64 µs (92 %), 8 rows 14 µs (53 %, 2 splits); over an e4m3 cache, 512 rows × 1,500
keys 407 µs (87 %).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.arguments import HeadPages, TileOrigin
from stoker.kernels.triton.attention.key_tile import block_ids, load_part, page_rows, prefetch_rows
from stoker.kernels.triton.attention.new_token import load_rotated_part, norm_factor, norm_weights, rotary_factors, store_new_token
from stoker.kernels.triton.attention.new_token_8bit import load_tile, load_tile_constants, queries_and_stored_token
from stoker.kernels.triton.attention.query_tile import (
    LOG2E,
    as_query_operand,
    initial_state,
    key_range,
    tile_rows,
)
from stoker.kernels.triton.attention.softmax import attend
from stoker.kernels.triton.attention.split_combine import store_or_combine
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["num_splits", "min_tiles", "stride_block_table"])
def decode_attention_kernel(
    # Pointers
    q_ptr,  # [rows, num_heads, size]
    out_ptr,  # [rows, num_heads, value_size], dense
    seq_lens_ptr,  # int32 [rows]
    block_tables_ptr,  # int32 [rows, max_blocks]
    decode_count_ptr,  # int32 [1], the rows to compute, or None: all
    split_tokens_ptr,  # int32 [1], keys that a split takes at least; None: `min_tiles` is valid
    prefix_lens_ptr,  # int32 [rows] (prefix LM) or None
    alibi_slopes_ptr,  # float32 [num_heads] or None
    sinks_ptr,  # float32 [num_heads] or None
    # Groups of pointers and strides
    cache,  # KVPages
    new,  # NewTokens or None
    scratch,  # SplitScratch
    # Sizes and strides
    scale,
    num_splits,
    min_tiles,  # key tiles that a split takes at least
    stride_q_token,
    stride_q_head,
    stride_block_table,
    # Groups of constants
    SHAPE: tl.constexpr,  # HeadShape
    TILE: tl.constexpr,  # QueryTile, of one token
    OPTIONS: tl.constexpr,  # ScoreOptions
    FEATURES: tl.constexpr,  # HeadFeatures of `new`; None: there are no new tokens (Triton can't compare a tuple that holds None with None)
    SPLITS: tl.constexpr,  # SplitShape
    FORMAT: tl.constexpr,  # OperandFormat
    LAUNCH_DEPENDENTS: tl.constexpr,  # whether the next kernel may start before this one has ended
    USE_PDL: tl.constexpr,
):
    """One CTA: attention of one query tile of a decode row over the keys of one split.

    `cache`: KVPages; `new`: NewTokens or None; `scratch`: SplitScratch; `scale`: the factor of scores. A split has at least `min_tiles` key
    tiles, or `split_tokens_ptr` keys. The constants are the named tuples of `arguments`; strides are in elements.
    """
    PAIRS: tl.constexpr = FORMAT.pairs
    STEP: tl.constexpr = 1 if PAIRS is None else 2
    GROUP_TILES: tl.constexpr = (SHAPE.group + TILE.heads - 1) // TILE.heads  # tiles for the query heads of one KV head
    HEAD_TILES: tl.constexpr = SHAPE.num_heads // SHAPE.group * GROUP_TILES  # tiles for all heads of a token
    PART1: tl.constexpr = SHAPE.part1
    PART2: tl.constexpr = SHAPE.part2
    SIZE: tl.constexpr = SHAPE.size
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    tile = tl.program_id(0)
    split = tl.program_id(1)
    head_tile = tile % HEAD_TILES
    kv_head = head_tile // GROUP_TILES
    row = tile // HEAD_TILES
    if decode_count_ptr is not None:  # noqa: SIM102 - a pointer that is None, then a value
        if row >= tl.load(decode_count_ptr, volatile=True):
            if row == 0:
                pdl_wait(USE_PDL)  # the launch after one without decodes must not start before those that it reads from have ended
            return
    origin = TileOrigin(kv_head, head_tile % GROUP_TILES * TILE.heads, row, 0, 1)

    # Everything until `pdl_wait` depends only on inputs of the step, which no kernel writes, and overlaps with the previous kernel.
    # The loads are volatile because the compiler moves plain loads behind the wait.
    length = tl.load(seq_lens_ptr + row, volatile=True)
    prefix = None
    if prefix_lens_ptr is not None:
        prefix = tl.load(prefix_lens_ptr + row)
    begin, end, _ = key_range(length - 1, length, prefix, SHAPE, TILE, OPTIONS)
    used = 1
    if SPLITS.power > 1:
        if split_tokens_ptr is not None:
            min_tiles = tl.maximum(tl.cdiv(tl.load(split_tokens_ptr, volatile=True), TILE.block_n), 1)
        tiles = tl.cdiv(end - begin, TILE.block_n)
        split_tiles = tl.maximum(tl.cdiv(tiles, num_splits), min_tiles)
        used = tl.maximum(tl.cdiv(tiles, split_tiles), 1)
        if split >= used:
            return
        begin += split * split_tiles * TILE.block_n
        end = tl.minimum(end, begin + split_tiles * TILE.block_n)
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * stride_block_table
    keys_ptr = cache.keys_ptr + kv_head.to(tl.int64) * cache.stride_key_head
    values_ptr = None
    if cache.values_ptr is not None:
        values_ptr = cache.values_ptr + kv_head.to(tl.int64) * cache.stride_value_head
    means_ptr = None
    if cache.key_mean_ptr is not None:
        means_ptr = cache.key_mean_ptr + kv_head * cache.stride_mean_head
    pages = HeadPages(keys_ptr, values_ptr, means_ptr, cache.stride_key_block, cache.stride_value_block, block_table_ptr)
    slot = -1
    angles1 = (1.0, 0.0)
    angles2 = (1.0, 0.0)
    if FEATURES is not None:
        slot = tl.load(new.slots_ptr + row, volatile=True)
        if PAIRS is not None:
            is_query = tile_rows(origin, length, SHAPE, TILE).inside[:, None]
            is_key = (tl.arange(0, TILE.block_m) == TILE.heads)[:, None]
            tile_constants = load_tile_constants(new, cache, row, kv_head, is_query, is_key, FEATURES)
        else:
            if FEATURES.half > 0:
                cos_sin_row_ptr = new.cos_sin_ptr + tl.load(new.positions_ptr + row, volatile=True).to(tl.int64) * (2 * FEATURES.half)
                angles1 = rotary_factors(cos_sin_row_ptr, 0, PART1, FEATURES)
                if 2 * FEATURES.half > PART1:
                    angles2 = rotary_factors(cos_sin_row_ptr, PART1, PART2, FEATURES)
            q_weights1 = norm_weights(new.q_norm_ptr, 0, PART1, SIZE, FEATURES)
            k_weights1 = norm_weights(new.k_norm_ptr, 0, PART1, SIZE, FEATURES)
            q_weights2 = q_weights1
            k_weights2 = k_weights1
            if PART2 > 0:
                q_weights2 = norm_weights(new.q_norm_ptr, PART1, PART2, SIZE, FEATURES)
                k_weights2 = norm_weights(new.k_norm_ptr, PART1, PART2, SIZE, FEATURES)
    first_block = block_ids(block_table_ptr, begin, end, BLOCK_SIZE, TILE.block_n, True)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL and LAUNCH_DEPENDENTS)

    # The queries [M, size] in two parts; with `new`, normalized and rotated, and the new key and value stored.
    rows = tile_rows(origin, length, SHAPE, TILE)
    q_rows = q_ptr + rows.token * stride_q_token + rows.head * stride_q_head
    if FEATURES is None:
        q1 = load_part(q_rows, 0, PART1, SIZE, rows.inside, STEP)
        q2 = q1
        if PART2 > 0:
            q2 = load_part(q_rows, PART1 if PAIRS is None else 1, PART2, SIZE, rows.inside, STEP)
    else:
        is_stored = (slot >= 0) & (split == used - 1)  # only the last split reads the new key
        if PAIRS is not None:
            parts = load_tile(q_rows, new, row, kv_head, is_query, is_key, FEATURES)
            if FORMAT.packed:
                # The first tile of keys and values arrives while the queries are loaded and transformed.
                key_rows = page_rows(keys_ptr, first_block, begin, cache.stride_key_block, SIZE, BLOCK_SIZE, TILE.block_n)
                prefetch_rows(key_rows, SIZE)
                VALUE_SIZE: tl.constexpr = SHAPE.value_size
                value_rows = page_rows(values_ptr, first_block, begin, cache.stride_value_block, VALUE_SIZE, BLOCK_SIZE, TILE.block_n)
                prefetch_rows(value_rows, VALUE_SIZE)
            q1, q2 = queries_and_stored_token(
                parts, new, cache, tile_constants, row, kv_head, slot, is_stored, is_key, FEATURES, BLOCK_SIZE
            )
        else:
            factor = norm_factor(q_rows, rows.inside, SHAPE, FEATURES)
            q1 = load_rotated_part(q_rows, factor, q_weights1, angles1, rows.inside, 0, PART1, SIZE, FEATURES)
            q1 = q1.to(q_ptr.dtype.element_ty)
            q2 = q1
            if PART2 > 0:
                q2 = load_rotated_part(q_rows, factor, q_weights2, angles2, rows.inside, PART1, PART2, SIZE, FEATURES)
                q2 = q2.to(q_ptr.dtype.element_ty)
            block = slot.to(tl.int64) // BLOCK_SIZE
            store_new_token(
                new.keys_ptr + row.to(tl.int64) * new.stride_key_token + kv_head * new.stride_key_head,
                new.values_ptr + row.to(tl.int64) * new.stride_value_token + kv_head * new.stride_value_head,
                k_weights1,
                k_weights2,
                angles1,
                angles2,
                keys_ptr + block * cache.stride_key_block + slot % BLOCK_SIZE * SIZE,
                values_ptr + block * cache.stride_value_block + slot % BLOCK_SIZE * SHAPE.value_size,
                is_stored,
                SHAPE,
                FEATURES,
            )
        tl.debug_barrier()  # other threads of the CTA read what was stored
    q1 = as_query_operand(q1, cache.keys_ptr.dtype.element_ty, PAIRS)
    q2 = as_query_operand(q2, cache.keys_ptr.dtype.element_ty, PAIRS)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + rows.head, mask=rows.inside, other=0.0) * LOG2E
    score_scale = scale
    if cache.key_scale_ptr is not None:
        score_scale = score_scale * tl.load(cache.key_scale_ptr + kv_head)
    state = initial_state(sinks_ptr, rows.head, rows.inside, split, SHAPE, TILE)

    state = attend(
        state, q1, q2, rows.position, pages, first_block, begin, end, prefix, None, slopes, score_scale, SHAPE, TILE, OPTIONS, FORMAT, True
    )
    store_or_combine(
        state, out_ptr, cache.value_scale_ptr, scratch, origin, rows, tile, split, used, num_splits, SHAPE, TILE, SPLITS, FORMAT
    )
