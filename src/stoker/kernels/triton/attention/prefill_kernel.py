"""Paged attention of prefill rows, which have several query tokens each: ragged, causal, over the cache that already holds their keys.

This kernel supports every model and device. On Hopper, long prompts without special masks use `warp_specialized` instead.

For query token t of a row with `length` tokens of which the last `num_queries` are queries, and query head h with KV head g = h // group:

    out[t, h] = Σ_j softmax_j(scale × q[t, h] · key[j, g]) × value[j, g]          j over the keys visible to t

    q     [tokens, num_heads, size]             queries of row r: query_starts[r] : query_starts[r + 1]
    out   [tokens, num_heads, value_size]       float32 sums, the queries' dtype

Grid: axis 0 has the query tiles, each of up to BLOCK_M rows (tokens × heads of one KV head, see `query_tile`), axis 1 the splits. Row
lengths are known on the device only, so the grid has an upper bound of tiles, and `row_tiles.find_row` searches the row of a tile. The
grid of a captured step is for padded sizes: CTAs read the numbers of decodes and of rows, and exit if their tile is after the last one.

Keys before the first query of a tile are visible to all its rows and need no mask:

    keys      | begin ......... unmasked ......... | masked: diagonal, end of row | end
    loop      |            attend, MASKED = False  |    attend, MASKED = True     |

The tokens of a draft tree (`tree`) attend to all keys before the tree, and to the nodes in their masks. The nodes are the last keys of the
row, and are in the masked part; other rows of the launch are computed as without trees.

Theoretical floor: the multiply-adds of the causal half at the rate of the tensor cores (790 TFLOP/s measured on an H200). Reached there
with 32 / 8 heads of 128: 4 × 2,048 tokens 342 µs (402 TFLOP/s), 1 × 8,192 tokens 1,162 µs (473; cuDNN 534, FlashAttention-2 313); over an
e4m3 cache, 4 × 2,048 tokens 462 µs (298).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.arguments import HeadPages, TileOrigin, TreeRows
from stoker.kernels.triton.attention.key_tile import load_part
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
from stoker.kernels.triton.row_tiles import find_row, num_token_tiles


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits", "min_tiles", "stride_block_table"])
def prefill_attention_kernel(
    # Pointers
    q_ptr,  # [tokens, num_heads, size]
    out_ptr,  # [tokens, num_heads, value_size], dense
    query_starts_ptr,  # int32 [num_rows + 1]
    seq_lens_ptr,  # int32 [num_rows]
    block_tables_ptr,  # int32 [num_rows, max_blocks]
    decode_count_ptr,  # int32 [1], replaces first_row, or None
    row_count_ptr,  # int32 [1], replaces num_rows, or None
    prefix_lens_ptr,  # int32 [num_rows] (prefix LM) or None
    tree,  # TreePages (draft trees) or None
    alibi_slopes_ptr,  # float32 [num_heads] or None
    sinks_ptr,  # float32 [num_heads] or None
    # Groups of pointers and strides
    cache,  # KVPages
    scratch,  # SplitScratch
    # Sizes and strides
    scale,
    first_row,  # rows before it are decode rows, which have one token each
    num_rows,
    num_splits,
    min_tiles,  # key tiles that a split takes at least
    stride_q_token,
    stride_q_head,
    stride_block_table,
    # Groups of constants
    SHAPE: tl.constexpr,  # HeadShape
    TILE: tl.constexpr,  # QueryTile
    OPTIONS: tl.constexpr,  # ScoreOptions
    SPLITS: tl.constexpr,  # SplitShape
    FORMAT: tl.constexpr,  # OperandFormat
    LAUNCH_DEPENDENTS: tl.constexpr,  # whether the next kernel may start before this one has ended
    USE_PDL: tl.constexpr,
):
    """One CTA: attention of one query tile of a prefill row over the keys of one split.

    `cache`: KVPages; `tree`: TreePages or None; `scratch`: SplitScratch; `scale`: the factor of scores. The rows are first_row : num_rows.
    A split has at least `min_tiles` key tiles. The constants are the named tuples of `arguments`; strides are in elements.
    """
    GROUP_TILES: tl.constexpr = (SHAPE.group + TILE.heads - 1) // TILE.heads  # tiles for the query heads of one KV head
    HEAD_TILES: tl.constexpr = SHAPE.num_heads // SHAPE.group * GROUP_TILES  # tiles for all heads of a token
    PART1: tl.constexpr = SHAPE.part1
    PART2: tl.constexpr = SHAPE.part2
    SIZE: tl.constexpr = SHAPE.size
    tile = tl.program_id(0)
    split = tl.program_id(1)
    head_tile = tile % HEAD_TILES
    kv_head = head_tile // GROUP_TILES
    group_start = head_tile % GROUP_TILES * TILE.heads
    token_tiles = tl.num_programs(0) // HEAD_TILES
    if decode_count_ptr is not None:
        first_row = tl.load(decode_count_ptr)
    if row_count_ptr is not None:
        num_rows = tl.load(row_count_ptr)
        token_tiles = num_token_tiles(query_starts_ptr, first_row, num_rows, TILE.tokens)
    # The last tiles of a row see the most keys: they start first, so that the launch ends with short CTAs.
    token_tile = token_tiles - 1 - tile // HEAD_TILES
    if token_tile < 0:
        if tile == 0:
            pdl_wait(USE_PDL)  # as in `decode_kernel`, if there are no prompts
        return
    row, tile_in_row = find_row(token_tile, query_starts_ptr, first_row, num_rows, TILE.tokens)
    first_token = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - first_token
    tile_start = tile_in_row * TILE.tokens
    if tile_start >= num_queries:
        if tile == 0:
            pdl_wait(USE_PDL)  # if no row has tokens
        return
    origin = TileOrigin(kv_head, group_start, first_token, tile_start, num_queries)
    length = tl.load(seq_lens_ptr + row, volatile=True)
    prefix = None
    if prefix_lens_ptr is not None:
        prefix = tl.load(prefix_lens_ptr + row)
    first_position = length - num_queries + tile_start
    begin, end, unmasked_end = key_range(first_position, length, prefix, SHAPE, TILE, OPTIONS)
    tree_start = None
    if tree is not None:
        # Nodes are stored in the order of the tree, and may be at any depth: all of them see the keys before the tree.
        tree_start = tl.load(tree.starts_ptr + row, volatile=True)
        begin, _, unmasked_end = key_range(tl.minimum(first_position, tree_start), length, prefix, SHAPE, TILE, OPTIONS)
        unmasked_end = tl.minimum(unmasked_end, tree_start)
    used = 1
    if SPLITS.power > 1:
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
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL and LAUNCH_DEPENDENTS)

    rows = tile_rows(origin, length, SHAPE, TILE)
    positions = rows.position
    tree_rows = None
    if tree is not None:
        depths = tl.load(tree.positions_ptr + rows.token, mask=rows.inside, other=0)
        positions = tl.where(first_position >= tree_start, depths, positions)
        tree_rows = TreeRows(tree_start, tl.load(tree.masks_ptr + rows.token, mask=rows.inside, other=0))
    q_rows = q_ptr + rows.token * stride_q_token + rows.head * stride_q_head
    q1 = load_part(q_rows, 0, PART1, SIZE, rows.inside)  # [M, part1]
    q2 = q1
    if PART2 > 0:
        q2 = load_part(q_rows, PART1, PART2, SIZE, rows.inside)  # [M, part2]
    q1 = as_query_operand(q1, cache.keys_ptr.dtype.element_ty, None)
    q2 = as_query_operand(q2, cache.keys_ptr.dtype.element_ty, None)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + rows.head, mask=rows.inside, other=0.0) * LOG2E
    score_scale = scale
    if cache.key_scale_ptr is not None:
        score_scale = score_scale * tl.load(cache.key_scale_ptr + kv_head)
    state = initial_state(sinks_ptr, rows.head, rows.inside, split, SHAPE, TILE)

    if OPTIONS.window is None and OPTIONS.chunk is None:
        middle = begin + tl.maximum(tl.minimum(unmasked_end, end) - begin, 0) // TILE.block_n * TILE.block_n
        state = attend(
            state, q1, q2, positions, pages, None, begin, middle, prefix, None, slopes, score_scale, SHAPE, TILE, OPTIONS, FORMAT, False
        )
        begin = middle
    state = attend(
        state, q1, q2, positions, pages, None, begin, end, prefix, tree_rows, slopes, score_scale, SHAPE, TILE, OPTIONS, FORMAT, True
    )
    store_or_combine(
        state, out_ptr, cache.value_scale_ptr, scratch, origin, rows, tile, split, used, num_splits, SHAPE, TILE, SPLITS, FORMAT
    )
