"""Paged attention: decode rows and ragged prefill rows by one kernel.

A program takes a tile of BLOCK_M query rows: the heads that share one key head (GQA), times as many tokens of one sequence as fit.
So a decode tile is one token's group of heads, and a key tile is read once for all of them. Long sequences are split over
programs (FlashDecoding); the last of them to finish combines the parts, which saves a launch. Nothing here depends on a value that
the host would have to read from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.new_token import factors, rotated_part, store_new
from stoker.kernels.triton.attention.paired_8bit import pair_scale
from stoker.kernels.triton.attention.query_tile import (
    LOG2E,
    LOWEST,
    attend,
    blocks_of,
    first_key,
    load_part,
    load_splits,
    store_head,
    store_part,
)
from stoker.kernels.triton.attention.split_combine import meet
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def find_row(tile, query_starts, first_row, num_rows, TOKENS: tl.constexpr):
    """(row, index of the tile inside the row) of a tile in the flat list.

    Row r's tiles start at (tokens before r) // TOKENS + (rows before r): at or past the end of row r - 1's, whatever the lengths are.
    """
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = (tl.load(query_starts + middle) - first_row) // TOKENS + middle - first_row
        low = tl.where(before <= tile, middle, low)
        high = tl.where(before <= tile, high, middle)
    return low, tile - ((tl.load(query_starts + low) - first_row) // TOKENS + low - first_row)


@triton.jit(do_not_specialize=["first_row", "num_rows", "splits", "min_tiles", "stride_table"])
def attention_kernel(
    q, keys, values, key_pages, value_pages, out, block_tables, seq_lens, query_starts, prefix_lens, key_scale, value_scale,
    key_mean, alibi_slopes, sinks, partial, partial_lse, arrived, messages, scale, first_row, num_rows, splits, min_tiles,
    new_keys, new_values, positions_of, cos_sin, slots,
    stride_q_token, stride_q_head, stride_table, stride_key_block, stride_key_head, stride_value_block, stride_value_head, stride_mean_head,
    stride_new_key_token, stride_new_key_head, stride_new_value_token, stride_new_value_head,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, DECODE: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    SIZE: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PART1: tl.constexpr, VALUE_PART2: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, COMBINE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, PAIRED: tl.constexpr, PACKED: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles × head tiles, splits). SPLITS is `splits` rounded up to a power of two; 1 compiles no combine.

    A tile's heads are TILE_HEADS of one group; row m of it is token m // TILE_HEADS, head m % TILE_HEADS.
    partial [programs of axis 0, splits, TOKENS × TILE_HEADS, VALUE_SIZE] and partial_lse (no last axis) are scratch; arrived [..] counts
    finished splits and is left at zero; with `messages` splits combine by these instead, in pieces of COLUMNS (see `attention_meeting`).
    PAIRED (e4m3, bytes or None): see `attention_pairs`; a head's two parts are its even and its odd
    features, of equal width.
    With new_keys and new_values [tokens, kv heads, features] the last token of each row is in no cache yet, and queries have not rotated
    (see `attention_new`).
    """
    STEP: tl.constexpr = 1 if PAIRED is None else 2
    GROUP_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    HEAD_TILES: tl.constexpr = NUM_HEADS // GROUP * GROUP_TILES
    BLOCK_ROWS: tl.constexpr = NUM_HEADS // GROUP * BLOCK_SIZE
    TILE_ROWS: tl.constexpr = TOKENS * TILE_HEADS
    unit = tl.program_id(0)
    split = tl.program_id(1)
    head_tile = unit % HEAD_TILES
    kv_head = head_tile // GROUP_TILES
    group_start = head_tile % GROUP_TILES * TILE_HEADS
    if DECODE:
        row = unit // HEAD_TILES
        first_token = row
        num_queries = 1
        tile_start = 0
    else:
        # The last tiles of a row see the most keys: they go first, so that the grid ends on short programs.
        tile = (tl.num_programs(0) - 1 - unit) // HEAD_TILES
        row, tile_in_row = find_row(tile, query_starts, first_row, num_rows, TOKENS)
        first_token = tl.load(query_starts + row)
        num_queries = tl.load(query_starts + row + 1) - first_token
        tile_start = tile_in_row * TOKENS
        if tile_start >= num_queries:
            return
    # Plain loads would be moved behind the wait for the launch before; these are done while it still runs.
    length = tl.load(seq_lens + row, volatile=True)
    prefix = None
    if prefix_lens is not None:
        prefix = tl.load(prefix_lens + row)

    first_position = length - num_queries + tile_start
    align: tl.constexpr = BLOCK_N if BLOCK_N < BLOCK_SIZE else BLOCK_SIZE
    begin = tl.maximum(first_key(first_position, WINDOW, CHUNK), 0) // align * align
    end = tl.minimum(first_position + TOKENS, length)
    plain_end = first_position + 1  # keys before this are seen by every query of the tile
    if prefix is not None:
        end = tl.maximum(end, tl.minimum(prefix, length))
        plain_end = tl.maximum(plain_end, tl.minimum(prefix, length))
    used = 1
    if SPLITS > 1:
        tiles = tl.cdiv(end - begin, BLOCK_N)
        tiles_each = tl.maximum(tl.cdiv(tiles, splits), min_tiles)
        used = tl.maximum(tl.cdiv(tiles, tiles_each), 1)
        if split >= used:
            return
        begin += split * tiles_each * BLOCK_N
        end = tl.minimum(end, begin + tiles_each * BLOCK_N)

    table = block_tables + row.to(tl.int64) * stride_table
    head_keys = keys + kv_head.to(tl.int64) * stride_key_head
    head_values = None
    if values is not None:
        head_values = values + kv_head.to(tl.int64) * stride_value_head
    slot = -1
    cos1, sin1, cos2, sin2 = 1.0, 0.0, 1.0, 0.0
    if new_keys is not None:
        slot = tl.load(slots + row, volatile=True)
        if HALF > 0:
            angles = cos_sin + tl.load(positions_of + row, volatile=True).to(tl.int64) * (2 * HALF)
            cos1, sin1 = factors(angles, 0, PART1, HALF, INTERLEAVED)
            if 2 * HALF > PART1:
                cos2, sin2 = factors(angles, PART1, PART2, HALF, INTERLEAVED)
    first_block = None
    if DECODE:
        first_block = blocks_of(table, begin, end, BLOCK_SIZE, BLOCK_N, True)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL and LAUNCH_DEPENDENTS)
    m = tl.arange(0, BLOCK_M)
    token = tile_start + m // TILE_HEADS
    head = kv_head * GROUP + group_start + m % TILE_HEADS
    inside = (token < num_queries) & (m < TILE_ROWS) & (group_start + m % TILE_HEADS < GROUP)
    positions = length - num_queries + token
    flat_token = (first_token + token).to(tl.int64)
    q_rows = q + flat_token * stride_q_token + head * stride_q_head
    if new_keys is None:
        q1 = load_part(q_rows, 0, PART1, SIZE, inside, STEP)
        q2 = q1
        if PART2 > 0:
            q2 = load_part(q_rows, PART1 if PAIRED is None else 1, PART2, SIZE, inside, STEP)
    else:
        q1 = rotated_part(q_rows, cos1, sin1, inside, 0, PART1, SIZE, HALF, INTERLEAVED).to(q.dtype.element_ty)
        q2 = q1
        if PART2 > 0:
            q2 = rotated_part(q_rows, cos2, sin2, inside, PART1, PART2, SIZE, HALF, INTERLEAVED).to(q.dtype.element_ty)
        page = slot.to(tl.int64) // BLOCK_SIZE
        store_new(
            new_keys + row.to(tl.int64) * stride_new_key_token + kv_head * stride_new_key_head,
            new_values + row.to(tl.int64) * stride_new_value_token + kv_head * stride_new_value_head, cos1, sin1, cos2, sin2,
            head_keys + page * stride_key_block + slot % BLOCK_SIZE * SIZE,
            head_values + page * stride_value_block + slot % BLOCK_SIZE * VALUE_SIZE, (slot >= 0) & (split == used - 1),
            SIZE, PART1, PART2, VALUE_SIZE, VALUE_PART1, VALUE_PART2, HALF, INTERLEAVED,
        )  # fmt: skip
        tl.debug_barrier()  # other threads read what was stored
    if PAIRED is not None or (keys.dtype.element_ty == tl.float8e4nv and q1.dtype == tl.bfloat16):
        # e4m3 becomes float16 in one instruction for two; bfloat16 takes three more. Queries of 65504 and above do not occur.
        q1 = q1.to(tl.float16)
        q2 = q2.to(tl.float16)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, mask=inside, other=0.0) * LOG2E
    score_scale = scale * pair_scale(PAIRED)
    if key_scale is not None:
        score_scale = score_scale * tl.load(key_scale + kv_head)

    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # noqa: SIM102 - settled when compiling; which split is not
        if split == 0:
            highest = tl.load(sinks + head, mask=inside, other=0.0) * LOG2E
            total += 1.0
    acc1 = tl.zeros([BLOCK_M, VALUE_PART1], tl.float32)
    acc2 = tl.zeros([BLOCK_M, VALUE_PART2 if VALUE_PART2 > 0 else 16], tl.float32)
    means = None
    if key_mean is not None:
        means = key_mean + kv_head * stride_mean_head
    if PAIRED is not None:
        head_keys = head_keys.to(tl.pointer_type(tl.int16), bitcast=True)
        head_values = head_values.to(tl.pointer_type(tl.int16), bitcast=True)
    if not DECODE and WINDOW is None and CHUNK is None:
        middle = begin + tl.maximum(tl.minimum(plain_end, end) - begin, 0) // BLOCK_N * BLOCK_N
        acc1, acc2, highest, total = attend(
            acc1, acc2, highest, total, q1, q2, head_keys, head_values, means, key_pages, value_pages, kv_head * BLOCK_SIZE,
            table, None, begin, middle, positions, prefix, slopes, score_scale, stride_key_block, stride_value_block, BLOCK_ROWS,
            SIZE, PART1, PART2, VALUE_SIZE, VALUE_PART1, VALUE_PART2, SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, False, PRECISION,
            None, PACKED,
        )  # fmt: skip
        begin = middle
    # Bulk copies would bring what lies past the last key too, and weight zero does not silence a NaN: masked loads here.
    acc1, acc2, highest, total = attend(
        acc1, acc2, highest, total, q1, q2, head_keys, head_values, means, None, None, 0,
        table, first_block, begin, end, positions, prefix, slopes, score_scale, stride_key_block // STEP,
        stride_value_block // STEP, BLOCK_ROWS, SIZE // STEP, PART1, PART2, VALUE_SIZE // STEP, VALUE_PART1, VALUE_PART2,
        SOFTCAP, WINDOW, CHUNK, BLOCK_SIZE, BLOCK_N, True, PRECISION, PAIRED, PACKED,
    )  # fmt: skip

    weight = pair_scale(PAIRED) / tl.where(total > 0.0, total, 1.0)  # a row without keys (padding) gives zeros
    if value_scale is not None:
        weight = weight * tl.load(value_scale + kv_head)
    acc1 = acc1 * weight[:, None]
    acc2 = acc2 * weight[:, None]
    if SPLITS == 1 or used == 1:
        out_rows = out + (flat_token * NUM_HEADS + head) * VALUE_SIZE
        store_head(out_rows, acc1, acc2, VALUE_PART1, VALUE_PART2, VALUE_SIZE, inside, PAIRED is not None)
    elif messages is not None:
        result = acc1
        if PAIRED is not None:
            result = tl.reshape(tl.join(acc1, acc2), (BLOCK_M, VALUE_SIZE))
        meet(
            out + (row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + group_start) * VALUE_SIZE, messages, result, highest + tl.log2(total),
            unit, split, used, inside, tl.minimum(TILE_HEADS, GROUP - group_start), TILE_HEADS, SPLITS, COLUMNS, PACKED,
        )  # fmt: skip
    else:
        place = (unit.to(tl.int64) * splits + split) * TILE_ROWS + m
        store_part(partial + place * VALUE_SIZE, acc1, 0, VALUE_PART1, VALUE_SIZE, inside)
        if VALUE_PART2 > 0:
            store_part(partial + place * VALUE_SIZE, acc2, VALUE_PART1, VALUE_PART2, VALUE_SIZE, inside)
        tl.store(partial_lse + place, highest + tl.log2(total), mask=inside)
        tl.debug_barrier()  # all threads' stores come before the one thread's release below
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(arrived + unit, 0)
            part = tl.arange(0, SPLITS)[:, None]
            known = part < used
            for first in tl.range(0, TILE_ROWS, COMBINE_ROWS):
                rest = first + tl.arange(0, COMBINE_ROWS)
                rest_token = tile_start + rest // TILE_HEADS
                rest_head = group_start + rest % TILE_HEADS
                keep = (rest_token < num_queries) & (rest < TILE_ROWS) & (rest_head < GROUP)
                place_all = (unit.to(tl.int64) * splits + part) * TILE_ROWS + rest[None, :]
                written = known & keep[None, :]
                # All loads first: the parts arrive while their shares are computed.
                parts1 = load_splits(partial + place_all * VALUE_SIZE, written, 0, VALUE_PART1, VALUE_SIZE)
                lse = tl.load(partial_lse + place_all, mask=written, other=LOWEST)
                share = tl.exp2(lse - tl.max(lse, 0)[None, :])
                share = (share / tl.sum(share, 0)[None, :])[:, :, None]
                rest_rows = out + ((first_token + rest_token).to(tl.int64) * NUM_HEADS + kv_head * GROUP + rest_head) * VALUE_SIZE
                whole1 = tl.sum(parts1 * share, 0)
                whole2 = whole1
                if VALUE_PART2 > 0:
                    parts2 = load_splits(partial + place_all * VALUE_SIZE, written, VALUE_PART1, VALUE_PART2, VALUE_SIZE)
                    whole2 = tl.sum(parts2 * share, 0)
                store_head(rest_rows, whole1, whole2, VALUE_PART1, VALUE_PART2, VALUE_SIZE, keep, PAIRED is not None)
