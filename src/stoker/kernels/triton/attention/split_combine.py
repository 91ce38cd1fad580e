"""Results of a query tile: normalized and stored, or combined with those of the tile's other splits (FlashDecoding).

A split s leaves, for each row, its normalized result x_s and the log2-sum-exp2 of its scores, l_s. The result over all keys is

    out = Σ_s w_s x_s / Σ_s w_s,     w_s = exp2(l_s - max l)

There are two ways to combine, both within the attention launch (a second launch would cost more than the sums):

By counter. Every split stores x_s and l_s and increments the tile's counter; the last one to do so adds all of them up. Stores, a fence, an
atomic operation and loads follow one another, which takes 3.3 µs of the 7 µs of one token's attention (32 / 8 heads of 128, 1,000 keys).

    partial [tiles, splits, rows, value_size], lse [tiles, splits, rows]        split 0  split 1  ...  last: Σ -> out

By flags, for launches of decode rows and of rows with draft tokens whose CTAs are all resident at once. Each 64-bit word carries one value
of x_s and l_s, so that a word which is not zero has arrived: no counter and no fence, as in NCCL's LL protocol. Every split adds up its own
slices of COLUMNS columns of a head (split s has slices s, s + splits, …):

    words [slices, splits, COLUMNS]    split 0 -> slice 0, split 1 -> slice 1, ...      word = | l_s : 32 | x_s : 32 |
             slice = (tile, row, columns / COLUMNS)

The only reader of a word sets it to zero again, which leaves the memory ready for the next launch, whatever its sizes are. Combining takes
1.5 to 2 µs so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.attention.key_tile import store_part
from stoker.kernels.triton.attention.query_tile import LOWEST


@triton.jit
def store_head(rows, x1, x2, inside, SHAPE: tl.constexpr, PAIRS: tl.constexpr):
    """Store both parts x1 and x2 of some heads' results at pointers `rows`: one after the other, or alternating when read in pairs."""
    if PAIRS is not None:
        WIDTH: tl.constexpr = 2 * SHAPE.value_part1
        store_part(rows, tl.reshape(tl.join(x1, x2), (x1.shape[0], WIDTH)), 0, WIDTH, SHAPE.value_size, inside)
    else:
        store_part(rows, x1, 0, SHAPE.value_part1, SHAPE.value_size, inside)
        if SHAPE.value_part2 > 0:
            store_part(rows, x2, SHAPE.value_part1, SHAPE.value_part2, SHAPE.value_size, inside)


@triton.jit
def store_or_combine(
    state,  # SoftmaxState of this split
    out_ptr,  # [T, num_heads, value_size]
    value_scale_ptr,  # or None
    scratch,  # SplitScratch
    origin,  # TileOrigin
    rows,  # TileRows
    tile,  # the index of the query tile in the launch
    split,
    used,  # the number of splits that have keys of this tile
    num_splits,
    SHAPE: tl.constexpr,  # HeadShape
    TILE: tl.constexpr,  # QueryTile
    SPLITS: tl.constexpr,  # SplitShape
    FORMAT: tl.constexpr,  # OperandFormat
):
    """Store the final result of a query tile, or combine this split's part of it with the other splits.

    `used` is the number of splits that the row uses, of `num_splits` that the grid has.
    """
    PAIRS: tl.constexpr = FORMAT.pairs
    M: tl.constexpr = TILE.block_m
    VALUE_SIZE: tl.constexpr = SHAPE.value_size
    weight = 1.0 / tl.where(state.total > 0.0, state.total, 1.0)  # a row without keys (padding) gives zeros
    if value_scale_ptr is not None:
        weight = weight * tl.load(value_scale_ptr + origin.kv_head)
    x1 = state.acc1 * weight[:, None]  # [M, value_part1]
    x2 = state.acc2 * weight[:, None]  # [M, value_part2]
    if SPLITS.power == 1 or used == 1:
        out_rows = out_ptr + (rows.token * SHAPE.num_heads + rows.head) * VALUE_SIZE
        store_head(out_rows, x1, x2, rows.inside, SHAPE, PAIRS)
    elif scratch.words_ptr is not None:
        x = x1
        if PAIRS is not None:
            x = tl.reshape(tl.join(x1, x2), (M, VALUE_SIZE))
        lse = state.highest + tl.log2(state.total)
        combine_by_flags(out_ptr, scratch.words_ptr, x, lse, rows.inside, origin, tile, split, used, SHAPE, TILE, SPLITS, FORMAT)
    else:
        lse = state.highest + tl.log2(state.total)
        combine_by_counter(x1, x2, lse, out_ptr, scratch, origin, rows, tile, split, used, num_splits, SHAPE, TILE, SPLITS, PAIRS)


@triton.jit
def load_splits(partial, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """[splits, rows, WIDTH]: features FIRST : FIRST + WIDTH of the results of several splits. `partial` [splits, rows] are pointers."""
    cols = FIRST + tl.arange(0, WIDTH)[None, None, :]
    return tl.load(partial[:, :, None] + cols, mask=inside[:, :, None] & (cols < SIZE), other=0.0)


@triton.jit
def combine_by_counter(
    x1,  # float32 [M, value_part1]: this split's normalized result
    x2,  # float32 [M, value_part2]
    lse,  # float32 [M]
    out_ptr,
    scratch,
    origin,
    rows,
    tile,
    split,
    used,
    num_splits,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Store this split's result x1, x2 and lse.

    The last split of the tile combines the results of all `used` splits and stores the output.
    """
    VALUE_SIZE: tl.constexpr = SHAPE.value_size
    TILE_ROWS: tl.constexpr = TILE.tokens * TILE.heads
    POWER: tl.constexpr = SPLITS.power
    COMBINE_ROWS: tl.constexpr = SPLITS.combine_rows
    partial_ptr, lse_ptr = scratch.partial_ptr, scratch.lse_ptr
    place = (tile.to(tl.int64) * num_splits + split) * TILE_ROWS + tl.arange(0, TILE.block_m)
    store_part(partial_ptr + place * VALUE_SIZE, x1, 0, SHAPE.value_part1, VALUE_SIZE, rows.inside)
    if SHAPE.value_part2 > 0:
        store_part(partial_ptr + place * VALUE_SIZE, x2, SHAPE.value_part1, SHAPE.value_part2, VALUE_SIZE, rows.inside)
    tl.store(lse_ptr + place, lse, mask=rows.inside)
    tl.debug_barrier()  # the stores of all threads come before the release of the one thread that counts
    if tl.atomic_add(scratch.finished_ptr + tile, 1, sem="acq_rel", scope="gpu") == used - 1:
        tl.store(scratch.finished_ptr + tile, 0)
        other = tl.arange(0, POWER)[:, None]  # [splits, 1]
        for first in tl.range(0, TILE_ROWS, COMBINE_ROWS):
            row = first + tl.arange(0, COMBINE_ROWS)
            token = origin.tile_start + row // TILE.heads
            head = origin.group_start + row % TILE.heads
            inside = (token < origin.num_queries) & (row < TILE_ROWS) & (head < SHAPE.group)
            places = (tile.to(tl.int64) * num_splits + other) * TILE_ROWS + row[None, :]  # [splits, rows]
            written = (other < used) & inside[None, :]
            # Values are requested before the weights are computed, so that they arrive meanwhile.
            values1 = load_splits(partial_ptr + places * VALUE_SIZE, written, 0, SHAPE.value_part1, VALUE_SIZE)
            lses = tl.load(lse_ptr + places, mask=written, other=LOWEST)
            weights = tl.exp2(lses - tl.max(lses, 0)[None, :])
            weights = (weights / tl.sum(weights, 0)[None, :])[:, :, None]
            out_token = (origin.first_token + token).to(tl.int64)
            out_rows = out_ptr + (out_token * SHAPE.num_heads + origin.kv_head * SHAPE.group + head) * VALUE_SIZE
            sum1 = tl.sum(values1 * weights, 0)  # [rows, value_part1]
            sum2 = sum1
            if SHAPE.value_part2 > 0:
                values2 = load_splits(partial_ptr + places * VALUE_SIZE, written, SHAPE.value_part1, SHAPE.value_part2, VALUE_SIZE)
                sum2 = tl.sum(values2 * weights, 0)
            store_head(out_rows, sum1, sum2, inside, SHAPE, PAIRS)


@triton.jit
def pack_words(x, lse):
    """int64 [M, N]: words with float32 x [M, N] in the low half and lse [M] in the high half. No word is zero."""
    bits = lse.to(tl.int32, bitcast=True)
    high = tl.where(bits == 0, -2147483648, bits).to(tl.int64)  # an lse of 0, of one key whose score is 0, becomes -0
    return (high << 32)[:, None] | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def store_words(words_ptr, x, lse, tile, split, inside, TILE_ROWS: tl.constexpr, POWER: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the result x [M, N] and lse [M] of a split as words, in slices of COLUMNS columns of a row. Only rows `inside` are stored."""
    m, n = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    slice_index = (tile * TILE_ROWS + m) * (x.shape[1] // COLUMNS) + n // COLUMNS
    tl.store(words_ptr + (slice_index * POWER + split) * COLUMNS + n % COLUMNS, pack_words(x, lse), mask=inside[:, None])


@triton.jit
def combine_slice(words_ptr, slice_index, used, POWER: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [COLUMNS]: the combined result of one slice, after waiting for the words of all `used` splits. Sets these words to zero."""
    other, col = tl.arange(0, POWER)[:, None], tl.arange(0, COLUMNS)[None, :]
    addresses = words_ptr + (slice_index * POWER + other) * COLUMNS + col  # [splits, COLUMNS]
    sent = (other < used) & (col < COLUMNS)
    words = tl.load(addresses, mask=sent, other=1, volatile=True)
    while tl.min(tl.min((words != 0).to(tl.int32), 1), 0) == 0:
        words = tl.load(addresses, mask=sent, other=1, volatile=True)
    tl.store(addresses, tl.zeros([POWER, COLUMNS], tl.int64), mask=sent)
    x = tl.where(sent, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    lse = tl.where(sent, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0)[None, :])
    return tl.sum(x * weights, 0) / tl.sum(weights, 0)


@triton.jit
def combine_by_flags(
    out_ptr,
    words_ptr,
    x,  # float32 [M, N]: this split's normalized result
    lse,  # float32 [M]
    inside,  # bool [M]
    origin,
    tile,
    split,
    used,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store this split's result as words, then combine the slices that belong to this split and store them in `out_ptr`.

    On a GPU all splits are resident. In the interpreter (`FORMAT.packed` is False) they run one after another, and the last one combines
    all slices.
    """
    TILE_ROWS: tl.constexpr = TILE.tokens * TILE.heads
    POWER: tl.constexpr = SPLITS.power
    COLUMNS: tl.constexpr = SPLITS.columns
    store_words(words_ptr, x, lse, tile, split, inside, TILE_ROWS, POWER, COLUMNS)
    SLICES: tl.constexpr = x.shape[1] // COLUMNS  # of a head
    IN_ORDER: tl.constexpr = not FORMAT.packed
    num_heads = tl.minimum(TILE.heads, SHAPE.group - origin.group_start)
    num_slices = tl.minimum(TILE.tokens, origin.num_queries - origin.tile_start) * num_heads * SLICES
    first, step = split, used
    if IN_ORDER:
        first, step = tl.where(split == used - 1, 0, num_slices), 1
    out_ptr += ((origin.first_token + origin.tile_start).to(tl.int64) * SHAPE.num_heads + origin.kv_head * SHAPE.group) * x.shape[1]
    out_ptr += origin.group_start * x.shape[1]
    for place in range(first, num_slices, step):
        row = place // SLICES
        part = place - row * SLICES  # the interpreter has no remainder of an integer and a constant
        token = row // num_heads
        head = row - token * num_heads
        combined = combine_slice(words_ptr, (tile * TILE_ROWS + token * TILE.heads + head) * SLICES + part, used, POWER, COLUMNS)
        columns = (token * SHAPE.num_heads + head) * x.shape[1] + part * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(out_ptr + columns, combined.to(out_ptr.dtype.element_ty))
