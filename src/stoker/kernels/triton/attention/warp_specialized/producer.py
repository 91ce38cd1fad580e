"""The producer of the warp-specialized prefill kernel: takes query tiles, and copies their queries, keys and values to shared memory.

Four warps with few registers. Tiles are taken from a counter in global memory, so that CTAs with short tiles take more of them. The key
tiles of all query tiles are one sequence, of which keys are copied one tile ahead of values, in the order in which consumers need them:

    query tile      | 0                         | 1              | ...        the queries are copied before the first keys
    keys of tile    | n-1  | n-2  | ...  | 0    | m-1  | m-2     | ...        from the last key tile to the first
    values of tile  |      | n-1  | n-2  | ...  | 0    | m-1     | ...

Keys and values are copied in bulk: one copy per block and 128 bytes of its rows, from a tensor map that has all rows of the cache. The ids
of the blocks are loaded from the block table one tile before. e4m3 keys are multiplied as they are; e4m3 values are copied to the `raw`
stages together with the keys of their tile, and converted to float16 one tile later. wgmma reads e4m3 matrices only with the summed axis
contiguous, which for values are the keys: they would have to be transposed.

A tile has no gaps: rows of the table before the first visible block or after the last block are replaced by those blocks. Masked keys
have no effect whatever their content is. Values have a weight of zero there, but zero times NaN is NaN, and unused slots of a cache may
be NaN: values after the end of a sequence are cleared.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from stoker.kernels.triton.attention.warp_specialized.pipeline import (
    BLOCK_N,
    K_STAGES,
    NUM_FIELDS,
    V_STAGES,
    box_rows,
    boxes_of,
    vector_layout,
    write_field,
)
from stoker.kernels.triton.kv_pages import mean_tokens
from stoker.kernels.triton.ptx.gluon_names import async_load
from stoker.kernels.triton.row_tiles import find_row, num_token_tiles

CLEARED_ROWS = gl.constexpr(32)  # rows that the producer holds in registers at once


@gluon.jit
def load_blocks(block_table_ptr, start, begin, length, CONFIG: gl.constexpr):
    """The ids of the blocks of keys start : start + BLOCK_N, a tuple with one per box.

    Blocks before that of key `begin`, and blocks after the last key of the sequence of `length` keys, are replaced by those two.
    """
    blocks = ()
    for part in gl.static_range(BLOCK_N // box_rows(CONFIG.block_size)):
        key = gl.minimum(start + part * box_rows(CONFIG.block_size), length - 1)
        if CONFIG.window is not None:
            key = gl.maximum(key, begin)
        blocks = blocks + (gl.load(block_table_ptr + key // CONFIG.block_size),)  # noqa: RUF005 - Triton has no unpacking
    return blocks


@gluon.jit
def copy_blocks(desc, boxes, stage, full, blocks, first_row, stride_block, CONFIG: gl.constexpr):
    """Issue the copies of a key tile to `stage`, and arrive at `full`, which they complete. `first_row`: that of the tile in block 0."""
    ROWS: gl.constexpr = box_rows(CONFIG.block_size)
    COLUMNS: gl.constexpr = desc.block_shape[1]
    PARTS: gl.constexpr = BLOCK_N // ROWS
    PANELS: gl.constexpr = CONFIG.size // COLUMNS
    mbarrier.expect(full, BLOCK_N * CONFIG.size * desc.dtype.primitive_bitwidth // 8)
    for part in gl.static_range(PARTS):
        row = blocks[part] * stride_block + first_row
        for panel in gl.static_range(PANELS):
            async_load(desc, [row, panel * COLUMNS], full, boxes.index((stage * PANELS + panel) * PARTS + part))


@gluon.jit
def clear_rows(x, end, CONFIG: gl.constexpr):
    """Store zeros in rows end … BLOCK_N - 1 of x [BLOCK_N, size], values that were copied in bulk."""
    LAYOUT: gl.constexpr = vector_layout(CONFIG.size, 2)
    rows = gl.arange(0, CLEARED_ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, CONFIG.size, gl.SliceLayout(0, LAYOUT))
    for part in gl.static_range(BLOCK_N // CLEARED_ROWS):
        target = x.slice(part * CLEARED_ROWS, CLEARED_ROWS, 0)
        inside = (part * CLEARED_ROWS + rows < end)[:, None] & (cols >= 0)[None, :]
        values = target.load(LAYOUT)
        target.store(gl.where(inside, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def convert(target, raw, CONFIG: gl.constexpr):
    """Store `raw` [BLOCK_N, size] of 8 bits in `target` as float16."""
    LAYOUT: gl.constexpr = vector_layout(CONFIG.size, 2)  # stores of 16 bytes, without bank conflicts
    for part in gl.static_range(BLOCK_N // CLEARED_ROWS):
        x = raw.slice(part * CLEARED_ROWS, CLEARED_ROWS, 0).load(LAYOUT)
        target.slice(part * CLEARED_ROWS, CLEARED_ROWS, 0).store(x.to(target.dtype))
    fence_async_shared()


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
def send_queries(queries, q_rows, place, sent, CONFIG: gl.constexpr):
    """Send the numbers of query tile number `sent` to the consumers, and copy its queries, as soon as they have released a stage."""
    q, tile, q_full, q_empty, tile_full = queries
    q_ptr, stride_token, stride_head = q_rows
    end_tile, first_tile, first_unmasked, first_position, first_token, num_queries, tile_start, head_tile = place
    GROUP_TILES: gl.constexpr = (CONFIG.group + CONFIG.heads - 1) // CONFIG.heads
    stage = sent % CONFIG.q_stages
    mbarrier.wait(q_empty.index(stage), (sent // CONFIG.q_stages & 1) ^ 1)
    write_field(tile.index(stage * NUM_FIELDS + 0), end_tile)
    write_field(tile.index(stage * NUM_FIELDS + 1), first_tile)
    write_field(tile.index(stage * NUM_FIELDS + 2), (first_position + 1) // BLOCK_N)
    write_field(tile.index(stage * NUM_FIELDS + 3), first_unmasked)
    write_field(tile.index(stage * NUM_FIELDS + 4), first_token + tile_start)
    write_field(tile.index(stage * NUM_FIELDS + 5), num_queries - tile_start)
    write_field(tile.index(stage * NUM_FIELDS + 6), first_position)
    write_field(tile.index(stage * NUM_FIELDS + 7), head_tile)
    mbarrier.arrive(tile_full.index(stage), count=1)
    first_head = head_tile // GROUP_TILES * CONFIG.group
    origin = (first_token, tile_start, num_queries, first_head, head_tile % GROUP_TILES * CONFIG.heads)
    for consumer in gl.static_range(2):
        copy_queries(q.index(2 * stage + consumer), q_ptr, stride_token, stride_head, origin, consumer, CONFIG)
    async_copy.mbarrier_arrive(q_full.index(stage), increment_count=False)


@gluon.jit
def provide_keys(buffers, maps, use, blocks, key_row, value_row, start, means_ptr, CONFIG: gl.constexpr):
    """Copy the keys of tile number `use`, which begins at key `start`, as soon as a stage is free; and e4m3 values to a raw stage."""
    k, _v, raw, means, k_full, k_empty, _v_full, _v_empty, raw_full = buffers
    k_desc, v_desc, stride_key_block, stride_value_block = maps
    if CONFIG.raw_stages > 0:
        stage = use % CONFIG.raw_stages
        boxes = boxes_of(raw, CONFIG.raw_stages, CONFIG)
        copy_blocks(v_desc, boxes, stage, raw_full.index(stage), blocks, value_row, stride_value_block, CONFIG)
    stage = use % K_STAGES
    mbarrier.wait(k_empty.index(stage), (use // K_STAGES & 1) ^ 1)
    boxes = boxes_of(k, K_STAGES, CONFIG)
    copy_blocks(k_desc, boxes, stage, k_full.index(stage), blocks, key_row, stride_key_block, CONFIG)
    if CONFIG.has_mean:
        if (start + BLOCK_N) % mean_tokens() == 0:  # the tile that is multiplied first of those with this mean
            cols = gl.arange(0, CONFIG.size, gl.BlockedLayout([4], [32], [4], [0]))
            mean_ptr = means_ptr + start // mean_tokens() * CONFIG.size
            async_copy.async_copy_global_to_shared(means.index(stage), mean_ptr + cols)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)


@gluon.jit
def provide_values(buffers, maps, use, blocks, value_row, end, num_cleared, CONFIG: gl.constexpr):
    """Copy or convert the values of tile number `use`, of which those from row `end` on are cleared. Returns the new `num_cleared`."""
    _k, v, raw, _means, _k_full, _k_empty, v_full, v_empty, raw_full = buffers
    _k_desc, v_desc, _stride_key_block, stride_value_block = maps
    stage = use % V_STAGES
    full = v_full.index(stage)
    if CONFIG.raw_stages > 0:
        raw_stage = use % CONFIG.raw_stages
        mbarrier.wait(raw_full.index(raw_stage), use // CONFIG.raw_stages & 1)
        mbarrier.wait(v_empty.index(stage), (use // V_STAGES & 1) ^ 1)
        convert(v.index(stage), raw.index(raw_stage), CONFIG)
        if end < BLOCK_N:
            clear_rows(v.index(stage), end, CONFIG)
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.wait(v_empty.index(stage), (use // V_STAGES & 1) ^ 1)
        boxes = boxes_of(v, V_STAGES, CONFIG)
        if end < BLOCK_N:
            copied = raw_full.index(0)
            copy_blocks(v_desc, boxes, stage, copied, blocks, value_row, stride_value_block, CONFIG)
            mbarrier.wait(copied, num_cleared & 1)
            clear_rows(v.index(stage), end, CONFIG)
            mbarrier.arrive(full, count=1)
            num_cleared += 1
        else:
            copy_blocks(v_desc, boxes, stage, full, blocks, value_row, stride_value_block, CONFIG)
    return num_cleared


@gluon.jit
def find_tile(ticket, num_tiles, counter_ptr, query_starts_ptr, first_row, num_rows, HEAD_TILES: gl.constexpr, CONFIG: gl.constexpr):
    """The tile of `ticket`, or of the next number from the counter that has queries. A ticket from num_tiles on has no tile.

    Returns (ticket, row, first token of the row, its number of queries, first query of the tile).
    """
    row = first_row
    first_token = 0
    num_queries = 0
    tile_start = 0
    while (ticket < num_tiles) & (tile_start >= num_queries):
        # The last tiles of a row see the most keys: they start first, so that the launch ends with short tiles.
        row, tile_in_row = find_row((num_tiles - 1 - ticket) // HEAD_TILES, query_starts_ptr, first_row, num_rows, CONFIG.tokens)
        first_token = gl.load(query_starts_ptr + row)
        num_queries = gl.load(query_starts_ptr + row + 1) - first_token
        tile_start = tile_in_row * CONFIG.tokens
        if tile_start >= num_queries:
            ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return ticket, row, first_token, num_queries, tile_start


@gluon.jit
def produce(inputs, numbers, queries, buffers, maps, CONFIG: gl.constexpr):
    """Take tiles until none is left, and copy what they need. The last message to the consumers is a tile without keys.

    `inputs`: pointers and strides; `numbers`: first_row, num_rows, and pointers to what replaces them; `queries` and `buffers`: shared
    memory and its mbarriers; `maps`: the tensor maps of keys and values, and the rows from one block to the next.
    """
    sequences, heads, q_rows = inputs
    query_starts_ptr, seq_lens_ptr, block_tables_ptr, counter_ptr, stride_block_table = sequences
    stride_key_head, stride_value_head, means_ptr, stride_mean_head = heads  # of keys and values: in rows
    first_row, num_rows, decode_count_ptr, row_count_ptr = numbers
    _q, tile, _q_full, q_empty, tile_full = queries
    GROUP_TILES: gl.constexpr = (CONFIG.group + CONFIG.heads - 1) // CONFIG.heads
    HEAD_TILES: gl.constexpr = CONFIG.num_heads // CONFIG.group * GROUP_TILES
    if decode_count_ptr is not None:
        first_row = gl.load(decode_count_ptr)
    if row_count_ptr is not None:
        num_rows = gl.load(row_count_ptr)
    num_tiles = num_token_tiles(query_starts_ptr, first_row, num_rows, CONFIG.tokens) * HEAD_TILES
    sent = 0  # query tiles
    used = 0  # key tiles whose keys were copied; the values of the last one are pending
    # The blocks of the pending values. They are loaded a second time, because Triton 3.6 does not carry the second of two names of a tuple
    # through a loop.
    pending_blocks = load_blocks(block_tables_ptr, 0, 0, 1, CONFIG)
    pending_row = 0
    pending_end = 0
    num_cleared = 0
    ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    ticket, row, first_token, num_queries, tile_start = find_tile(
        ticket, num_tiles, counter_ptr, query_starts_ptr, first_row, num_rows, HEAD_TILES, CONFIG
    )
    while ticket < num_tiles:
        head_tile = ticket % HEAD_TILES
        kv_head = head_tile // GROUP_TILES
        length = gl.load(seq_lens_ptr + row)
        first_position = length - num_queries + tile_start
        end_tile = (gl.minimum(first_position + CONFIG.tokens, length) + BLOCK_N - 1) // BLOCK_N
        first_tile = 0
        begin = 0
        first_unmasked = 0
        if CONFIG.window is not None:
            begin = gl.maximum(first_position - (CONFIG.window - 1), 0)
            first_tile = begin // BLOCK_N
            first_unmasked = (gl.maximum(first_position + CONFIG.tokens - CONFIG.window, 0) + BLOCK_N - 1) // BLOCK_N
        if CONFIG.has_mean:
            first_unmasked = gl.maximum(first_unmasked, 1)  # the first key differs from the others of tile 0
        start = (end_tile - 1) * BLOCK_N
        block_table_ptr = block_tables_ptr + row.to(gl.int64) * stride_block_table
        blocks = load_blocks(block_table_ptr, start, begin, length, CONFIG)
        place = (end_tile, first_tile, first_unmasked, first_position, first_token, num_queries, tile_start, head_tile)
        send_queries(queries, q_rows, place, sent, CONFIG)
        sent += 1

        key_row = kv_head * stride_key_head
        value_row = kv_head * stride_value_head
        head_means_ptr = None
        if CONFIG.has_mean:
            head_means_ptr = means_ptr + kv_head.to(gl.int64) * stride_mean_head
        count = end_tile - first_tile
        ticket = -1
        for i in range(count):
            offset = start % CONFIG.block_size // box_rows(CONFIG.block_size) * box_rows(CONFIG.block_size)
            provide_keys(buffers, maps, used, blocks, key_row + offset, value_row + offset, start, head_means_ptr, CONFIG)
            if used > 0:
                num_cleared = provide_values(buffers, maps, used - 1, pending_blocks, pending_row, pending_end, num_cleared, CONFIG)
            if CONFIG.raw_stages == 0:
                pending_blocks = load_blocks(block_table_ptr, start, begin, length, CONFIG)
            pending_row = value_row + offset
            pending_end = gl.minimum(length - start, BLOCK_N)
            used += 1
            start -= BLOCK_N
            blocks = load_blocks(block_table_ptr, gl.maximum(start, 0), begin, length, CONFIG)
            if i == gl.maximum(count - 3, 0):  # early enough to hide its latency, late enough for short tiles to balance CTAs
                ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed")
        ticket, row, first_token, num_queries, tile_start = find_tile(
            ticket, num_tiles, counter_ptr, query_starts_ptr, first_row, num_rows, HEAD_TILES, CONFIG
        )
    if used > 0:
        provide_values(buffers, maps, used - 1, pending_blocks, pending_row, pending_end, num_cleared, CONFIG)
    stage = sent % CONFIG.q_stages
    mbarrier.wait(q_empty.index(stage), (sent // CONFIG.q_stages & 1) ^ 1)
    write_field(tile.index(stage * NUM_FIELDS), 0)
    mbarrier.arrive(tile_full.index(stage), count=1)
    # Every CTA takes one number that is no tile. The CTA with the last of these numbers resets the counter for the next launch.
    if ticket == num_tiles + gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
