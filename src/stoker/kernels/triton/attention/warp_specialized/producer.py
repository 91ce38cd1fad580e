"""The producer of the warp-specialized prefill kernel: takes query tiles, and copies their queries, keys and values to shared memory.

Four warps with few registers. Tiles are taken from a counter in global memory, so that CTAs with short tiles take more of them; the copies
of a tile begin while the consumers still compute the tile before it.

Keys and values are copied by `cp.async`, 16 bytes per thread at a time, from the pages that the block table names. e4m3 keys are multiplied
as they are; e4m3 values go through the `raw` stages, and the producer converts them to float16 when they have arrived:

    cp.async    | V n-1, K n-1 | V n-2, K n-2 | V n-3, K n-3 | ...        raw_stages - 1 tiles ahead
    convert                    | V n-1        | V n-2        | ...

wgmma reads e4m3 matrices only with the summed axis contiguous, which for values are the keys: they would have to be transposed.

Key tiles go from the last one to the first. Keys from the end on are zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from stoker.kernels.triton.attention.warp_specialized.pipeline import (
    BLOCK_N,
    NUM_FIELDS,
    V_STAGES,
    vector_layout,
    write_field,
)
from stoker.kernels.triton.kv_pages import mean_tokens
from stoker.kernels.triton.row_tiles import find_row, num_token_tiles


@gluon.jit
def copy_pages(target, pages_ptr, block_table_ptr, start, begin, end, stride_block, CONFIG: gl.constexpr):
    """Issue the copies of keys or values start : start + BLOCK_N of one head to `target` [BLOCK_N, size].

    Zeros replace those from `end` on and those before `begin`, where the first block begins that is visible in a window: earlier blocks
    may belong to other sequences, and NaN times a weight of zero is NaN.
    """
    SIZE: gl.constexpr = CONFIG.size
    BLOCK_SIZE: gl.constexpr = CONFIG.block_size
    ROWS: gl.constexpr = BLOCK_N if BLOCK_N < BLOCK_SIZE else BLOCK_SIZE
    LAYOUT: gl.constexpr = vector_layout(SIZE, target.dtype.primitive_bitwidth // 8)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    offsets = rows[:, None] * SIZE + cols[None, :]
    for part in gl.static_range(BLOCK_N // ROWS):
        first = start + part * ROWS
        known = gl.minimum(first, end - 1)  # entries after the last key are not valid
        if CONFIG.window is not None:
            known = gl.maximum(known, begin)
        block = gl.load(block_table_ptr + known // BLOCK_SIZE)
        page_ptr = pages_ptr + block.to(gl.int64) * stride_block + first % BLOCK_SIZE * SIZE
        limit = end
        if CONFIG.window is not None:
            limit = gl.where(first >= begin, end, 0)
        inside = (first + rows < limit)[:, None] & (cols >= 0)[None, :]
        async_copy.async_copy_global_to_shared(target.slice(part * ROWS, ROWS, 0), page_ptr + offsets, mask=inside)


@gluon.jit
def convert(target, raw, full, CONFIG: gl.constexpr):
    """Store `raw` [BLOCK_N, size] of 8 bits in `target` as float16, and report that it is complete."""
    ROWS: gl.constexpr = 32  # more would need more registers
    LAYOUT: gl.constexpr = vector_layout(CONFIG.size, 2)  # stores of 16 bytes, without bank conflicts
    for part in gl.static_range(BLOCK_N // ROWS):
        x = raw.slice(part * ROWS, ROWS, 0).load(LAYOUT)
        target.slice(part * ROWS, ROWS, 0).store(x.to(target.dtype))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def copy_queries(target, q_ptr, stride_token, stride_head, origin, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the copies of the queries of one consumer to `target` [64, size]; rows of padding are zero."""
    first_token, tile_start, num_queries, first_head, group_start = origin
    LAYOUT: gl.constexpr = vector_layout(CONFIG.size, 2)
    cols = gl.arange(0, CONFIG.size, gl.SliceLayout(0, LAYOUT))
    m = 64 * CONSUMER + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    token = tile_start + m // CONFIG.heads
    head = group_start + m % CONFIG.heads
    inside = (token < num_queries) & (m < CONFIG.tokens * CONFIG.heads) & (head < CONFIG.group)
    rows_ptr = q_ptr + (first_token + token).to(gl.int64) * stride_token + (first_head + head) * stride_head
    mask = inside[:, None] & (cols >= 0)[None, :]
    async_copy.async_copy_global_to_shared(target, rows_ptr[:, None] + cols[None, :], mask=mask)


@gluon.jit
def produce_keys(buffers, pages, counter_ptr, first_tile, begin, end, used, CONFIG: gl.constexpr):
    """Copy the key tiles and value tiles of one query tile, of which keys begin : end may be visible, and take the next query tile.

    `used`: key tiles that were copied before it. Returns (the new number, the number from the counter). With an e4m3 cache, that one is
    taken before the last values are converted, which usually wait for a stage.
    """
    k, v, raw, means, k_full, k_empty, v_full, v_empty = buffers
    keys_ptr, values_ptr, stride_key_block, stride_value_block, block_table_ptr, means_ptr = pages
    last_tile = (end - 1) // BLOCK_N
    count = last_tile + 1 - first_tile
    AHEAD: gl.constexpr = CONFIG.raw_stages - 1 if CONFIG.raw_stages > 0 else 0
    ticket = 0
    for i in range(-AHEAD, count):
        ahead = used + i + AHEAD
        start = (last_tile - i - AHEAD) * BLOCK_N
        if i + AHEAD < count:
            if CONFIG.raw_stages > 0:
                copy_pages(raw.index(ahead % CONFIG.raw_stages), values_ptr, block_table_ptr, start, begin, end, stride_value_block, CONFIG)
            stage = ahead % CONFIG.k_stages
            mbarrier.wait(k_empty.index(stage), (ahead // CONFIG.k_stages & 1) ^ 1)
            copy_pages(k.index(stage), keys_ptr, block_table_ptr, start, begin, end, stride_key_block, CONFIG)
            if CONFIG.has_mean:  # noqa: SIM102 - the outer condition is a constant, the inner one is not
                if (start + BLOCK_N) % mean_tokens() == 0:
                    cols = gl.arange(0, CONFIG.size, gl.BlockedLayout([4], [32], [4], [0]))
                    mean_ptr = means_ptr + start // mean_tokens() * CONFIG.size
                    async_copy.async_copy_global_to_shared(means.index(stage), mean_ptr + cols)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        if CONFIG.raw_stages > 0:
            async_copy.commit_group()
            if i + 1 == count:
                ticket = gl.atomic_add(counter_ptr, 1)
        if i >= 0:
            use = used + i
            stage = use % V_STAGES
            if CONFIG.raw_stages > 0:
                async_copy.wait_group(AHEAD)
            mbarrier.wait(v_empty.index(stage), (use // V_STAGES & 1) ^ 1)
            if CONFIG.raw_stages == 0:
                copy_pages(v.index(stage), values_ptr, block_table_ptr, start, begin, end, stride_value_block, CONFIG)
                async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            else:
                convert(v.index(stage), raw.index(use % CONFIG.raw_stages), v_full.index(stage), CONFIG)
    if CONFIG.raw_stages == 0:
        ticket = gl.atomic_add(counter_ptr, 1)
    return used + count, ticket


@gluon.jit
def produce(inputs, numbers, queries, buffers, CONFIG: gl.constexpr):
    """Take tiles until none is left, and copy what they need. The last message to the consumers is a tile without keys.

    `inputs`: pointers and strides; `numbers`: first_row, num_rows, and pointers to what replaces them; `queries` and `buffers`: shared
    memory and its mbarriers.
    """
    (q_ptr, query_starts_ptr, seq_lens_ptr, block_tables_ptr, counter_ptr, stride_q_token, stride_q_head, stride_block_table) = inputs[0]
    keys_ptr, values_ptr, stride_key_block, stride_key_head, stride_value_block, stride_value_head, means_ptr, stride_mean_head = inputs[1]
    first_row, num_rows, decode_count_ptr, row_count_ptr = numbers
    q, tile, q_full, q_empty, tile_full = queries
    GROUP_TILES: gl.constexpr = (CONFIG.group + CONFIG.heads - 1) // CONFIG.heads
    HEAD_TILES: gl.constexpr = CONFIG.num_heads // CONFIG.group * GROUP_TILES
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    sent = 0
    used = 0
    if decode_count_ptr is not None:
        first_row = gl.load(decode_count_ptr)
    if row_count_ptr is not None:
        num_rows = gl.load(row_count_ptr)
    num_tiles = num_token_tiles(query_starts_ptr, first_row, num_rows, CONFIG.tokens) * HEAD_TILES
    ticket = gl.atomic_add(counter_ptr, 1)
    while ticket < num_tiles:
        # The last tiles of a row see the most keys: they start first, so that the launch ends with short tiles.
        head_tile = ticket % HEAD_TILES
        row, tile_in_row = find_row((num_tiles - 1 - ticket) // HEAD_TILES, query_starts_ptr, first_row, num_rows, CONFIG.tokens)
        first_token = gl.load(query_starts_ptr + row)
        num_queries = gl.load(query_starts_ptr + row + 1) - first_token
        tile_start = tile_in_row * CONFIG.tokens
        if tile_start < num_queries:
            kv_head = head_tile // GROUP_TILES
            length = gl.load(seq_lens_ptr + row)
            first_position = length - num_queries + tile_start
            end = gl.minimum(first_position + CONFIG.tokens, length)
            end_tile = (end + BLOCK_N - 1) // BLOCK_N
            first_tile = 0
            begin = 0
            first_unmasked = 0
            if CONFIG.window is not None:
                first_key = gl.maximum(first_position - (CONFIG.window - 1), 0)
                first_tile = first_key // BLOCK_N
                begin = first_key // CONFIG.block_size * CONFIG.block_size
                first_unmasked = (gl.maximum(first_position + CONFIG.tokens - CONFIG.window, 0) + BLOCK_N - 1) // BLOCK_N
            if CONFIG.has_mean:
                first_unmasked = gl.maximum(first_unmasked, 1)  # the first key differs from the others of tile 0
            stage = sent % Q_STAGES
            mbarrier.wait(q_empty.index(stage), (sent // Q_STAGES & 1) ^ 1)
            write_field(tile.index(stage * NUM_FIELDS + 0), end_tile)
            write_field(tile.index(stage * NUM_FIELDS + 1), first_tile)
            write_field(tile.index(stage * NUM_FIELDS + 2), (first_position + 1) // BLOCK_N)
            write_field(tile.index(stage * NUM_FIELDS + 3), first_unmasked)
            write_field(tile.index(stage * NUM_FIELDS + 4), first_token + tile_start)
            write_field(tile.index(stage * NUM_FIELDS + 5), num_queries - tile_start)
            write_field(tile.index(stage * NUM_FIELDS + 6), first_position)
            write_field(tile.index(stage * NUM_FIELDS + 7), head_tile)
            mbarrier.arrive(tile_full.index(stage), count=1)
            origin = (first_token, tile_start, num_queries, kv_head * CONFIG.group, head_tile % GROUP_TILES * CONFIG.heads)
            for consumer in gl.static_range(2):
                copy_queries(q.index(2 * stage + consumer), q_ptr, stride_q_token, stride_q_head, origin, consumer, CONFIG)
            async_copy.mbarrier_arrive(q_full.index(stage), increment_count=False)
            sent += 1
            head_keys_ptr = keys_ptr + kv_head.to(gl.int64) * stride_key_head
            head_values_ptr = values_ptr + kv_head.to(gl.int64) * stride_value_head
            block_table_ptr = block_tables_ptr + row.to(gl.int64) * stride_block_table
            head_means_ptr = head_keys_ptr  # not used
            if CONFIG.has_mean:
                head_means_ptr = means_ptr + kv_head.to(gl.int64) * stride_mean_head
            pages = (head_keys_ptr, head_values_ptr, stride_key_block, stride_value_block, block_table_ptr, head_means_ptr)
            used, ticket = produce_keys(buffers, pages, counter_ptr, first_tile, begin, end, used, CONFIG)
        else:
            ticket = gl.atomic_add(counter_ptr, 1)
    stage = sent % Q_STAGES
    mbarrier.wait(q_empty.index(stage), (sent // Q_STAGES & 1) ^ 1)
    write_field(tile.index(stage * NUM_FIELDS), 0)
    mbarrier.arrive(tile_full.index(stage), count=1)
    # Every CTA takes one number that is no tile. The CTA with the last of these numbers resets the counter for the next launch.
    if ticket == num_tiles + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
