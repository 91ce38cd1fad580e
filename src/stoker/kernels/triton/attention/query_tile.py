"""The geometry of a query tile: its position, its rows, and the keys that these attend to.

The rows of a tile are the query heads that share one KV head (GQA), for as many tokens of one sequence as fit, so that each key tile is
loaded once for all of them. A group of 4 heads in a tile of 16 rows:

    row m      0      1      2      3      4      5      6      7     ...    15
    token      t      t      t      t     t+1    t+1    t+1    t+1    ...   t+3       t = tile_start
    head       h     h+1    h+2    h+3     h     h+1    h+2    h+3    ...   h+3       h = kv_head × group + group_start

A decode tile has one token. A group with more heads than the tile has rows is cut into several tiles (`group_start`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.arguments import SoftmaxState, TileRows

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that the difference of two running maxima is never NaN


@triton.jit
def tile_rows(origin, length, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """The `TileRows` of the tile at `origin` (a TileOrigin) of a sequence of `length` tokens."""
    m = tl.arange(0, TILE.block_m)
    token = origin.tile_start + m // TILE.heads
    head = origin.kv_head * SHAPE.group + origin.group_start + m % TILE.heads
    inside = (token < origin.num_queries) & (m < TILE.tokens * TILE.heads) & (origin.group_start + m % TILE.heads < SHAPE.group)
    position = length - origin.num_queries + token
    return TileRows((origin.first_token + token).to(tl.int64), head, position, inside)


@triton.jit
def first_visible_key(position, OPTIONS: tl.constexpr):
    """The position of the first key that the query at `position` attends to, according to window and chunk."""
    first = position * 0
    if OPTIONS.window is not None:
        first = tl.maximum(first, position - (OPTIONS.window - 1))
    if OPTIONS.chunk is not None:
        first = tl.maximum(first, position // OPTIONS.chunk * OPTIONS.chunk)
    return first


@triton.jit
def is_visible(key, position, end, prefix, tree, OPTIONS: tl.constexpr, TOKENS: tl.constexpr):
    """bool [M, N], or [1, N] for all rows: whether the query at `position` [M, 1] attends to the key at `key` [1, N].

    Keys from `end` on do not exist, or follow all of the TOKENS tokens of the tile (see `key_range`). The first `prefix` keys of a prefix
    LM (None: not one) are visible to all queries. With a `tree` (TreeRows, or None), its keys are visible to the queries whose masks
    contain them.
    """
    seen = key < end
    if TOKENS > 1 or prefix is not None or tree is not None:  # else no key before the end follows the query
        seen = key <= position
        if tree is not None:
            node = tl.minimum(tl.maximum(key - tree.start, 0), 63).to(tl.int64)
            in_mask = ((tree.masks[:, None] >> node) & 1) == 1
            seen = tl.where(key < tree.start, seen, in_mask)
        if prefix is not None:
            seen = seen | (key < prefix)
        seen = seen & (key < end)
    if OPTIONS.window is not None:
        seen = seen & (key > position - OPTIONS.window)
    if OPTIONS.chunk is not None:
        seen = seen & (key // OPTIONS.chunk == position // OPTIONS.chunk)
    return seen


@triton.jit
def key_range(first_position, length, prefix, SHAPE: tl.constexpr, TILE: tl.constexpr, OPTIONS: tl.constexpr):
    """(begin, end, unmasked_end): the keys begin : end that rows of a tile attend to, whose first query is at `first_position`.

    `begin` is aligned to key tiles or blocks. Without a window or chunks, keys before `unmasked_end` are visible to every row.
    """
    ALIGN: tl.constexpr = TILE.block_n if TILE.block_n < SHAPE.block_size else SHAPE.block_size
    begin = tl.maximum(first_visible_key(first_position, OPTIONS), 0) // ALIGN * ALIGN
    end = tl.minimum(first_position + TILE.tokens, length)
    unmasked_end = first_position + 1
    if prefix is not None:
        end = tl.maximum(end, tl.minimum(prefix, length))
        unmasked_end = tl.maximum(unmasked_end, tl.minimum(prefix, length))
    return begin, end, unmasked_end


@triton.jit
def as_query_operand(q, key_dtype: tl.constexpr, PAIRS: tl.constexpr):
    """q in the dtype in which it is multiplied by keys.

    For keys of e4m3 this is float16: converting two keys to float16 is one instruction, and to bfloat16 four. Queries of 65,504 and above
    do not occur.
    """
    if PAIRS is not None or (key_dtype == tl.float8e4nv and q.dtype == tl.bfloat16):
        return q.to(tl.float16)
    else:
        return q


@triton.jit
def initial_state(sinks_ptr, head, inside, split, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """The `SoftmaxState` before the first key. A sink is a logit per head that has no value; only the first split includes it."""
    M: tl.constexpr = TILE.block_m
    WIDTH1: tl.constexpr = SHAPE.value_part1
    WIDTH2: tl.constexpr = SHAPE.value_part2 if SHAPE.value_part2 > 0 else 16  # never read when there is no second part
    highest = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - the outer condition is a constant, the inner one is not
        if split == 0:
            highest = tl.load(sinks_ptr + head, mask=inside, other=0.0) * LOG2E
            total += 1.0
    return SoftmaxState(tl.zeros([M, WIDTH1], tl.float32), tl.zeros([M, WIDTH2], tl.float32), highest, total)
