"""What one program of the attention kernel does with a tile of queries: online softmax over key tiles, and the combine of splits.

A head's features are cut in two parts, each padded to a power of two (80 = 64 + 16, 192 = 128 + 64, 576 = 512 + 64), because
a tile's sides are powers of two and padding 80 to 128 would load and multiply 60 % more. A part of zero width is not compiled.
Scores are kept in units of log2 e, so that the softmax uses exp2 (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import tanh
from stoker.kernels.triton.attention.paired_8bit import halves, pair_scale
from stoker.kernels.triton.rope import mean_tokens

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that differences of two running maxima are never NaN


@triton.jit
def load_part(rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, inside, STEP: tl.constexpr = 1):
    """WIDTH features of each row, every STEP-th from FIRST on, those past SIZE as zeros. `rows` are pointers [N]; `inside` [N] or None."""
    cols = FIRST + STEP * tl.arange(0, WIDTH)[None, :]
    where = rows[:, None] + cols
    if inside is None:
        if FIRST + STEP * (WIDTH - 1) < SIZE:
            return tl.load(where)
        else:
            return tl.load(where, mask=cols < SIZE, other=0.0)
    else:
        if FIRST + STEP * (WIDTH - 1) < SIZE:
            return tl.load(where, mask=inside[:, None], other=0.0)
        else:
            return tl.load(where, mask=inside[:, None] & (cols < SIZE), other=0.0)


@triton.jit
def as_operand(x, DTYPE: tl.constexpr):
    """x in DTYPE, as the right operand of a product over its rows.

    Such an operand is read from shared memory transposed, which matrix loads do for 16-bit elements only. Left alone, Triton moves the
    conversion past the read and reads 8-bit elements one by one (64 loads a thread for a tile of 64 × 128). It moves nothing past a join.
    """
    if x.dtype.primitive_bitwidth == 8 and tl.float32 != DTYPE:
        even, odd = tl.split(tl.reshape(x.to(DTYPE), (x.shape[0], x.shape[1] // 2, 2)))
        return tl.reshape(tl.join(even, odd), (x.shape[0], x.shape[1]))
    else:
        return x.to(DTYPE)


@triton.jit
def blocks_of(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr = False):
    """Block ids of the BLOCK_N tokens from `start` on: one when they share a block, else one a token. Reads no entry past `end`'s.

    EARLY: before the wait for the launch before.
    """
    if BLOCK_N <= BLOCK_SIZE:
        return tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0, volatile=EARLY)
    else:
        key = start + tl.arange(0, BLOCK_N)
        return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0, volatile=EARLY)


@triton.jit
def page_rows(pages, block, start, stride_block, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the BLOCK_N tokens from `start` on, a multiple of min(BLOCK_N, BLOCK_SIZE)."""
    place = (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    if BLOCK_N <= BLOCK_SIZE:
        place = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    return pages + block.to(tl.int64) * stride_block + place * SIZE


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at `position` may see."""
    first = position * 0
    if WINDOW is not None:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK is not None:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def is_visible(key, position, end, prefix, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Whether the query at position [M, 1] sees key [1, N]."""
    seen = key <= position
    if prefix is not None:
        seen = seen | (key < prefix)
    seen = seen & (key < end)
    if WINDOW is not None:
        seen = seen & (key > position - WINDOW)
    if CHUNK is not None:
        seen = seen & (key // CHUNK == position // CHUNK)
    return seen


@triton.jit
def mean_scores(
    q1, q2, means, start, SIZE: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr, PRECISION: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """Products [M] of queries with what is missing in the keys around `start`. `means`: rows of a head, each for MEAN_TOKENS keys.

    Heads have one part, or are read in pairs.
    """
    STEP: tl.constexpr = 1 if PAIRED is None else 2
    unit: tl.constexpr = 1.0 / pair_scale(PAIRED)
    rows = means + start // mean_tokens() * SIZE + tl.zeros([16], tl.int32)  # the least that a matrix instruction takes: all the same one
    scores = tl.dot(q1, tl.trans((load_part(rows, 0, PART1, SIZE, None, STEP) * unit).to(q1.dtype)), input_precision=PRECISION)
    if PAIRED is not None:
        rest = load_part(rows, 1, PART2, SIZE, None, STEP)
        scores = tl.dot(q2, tl.trans((rest * unit).to(q1.dtype)), scores, input_precision=PRECISION)
    return tl.max(scores, 1)


@triton.jit
def attend(
    acc1, acc2, highest, total, q1, q2, keys, values, means, key_pages, value_pages, page_row, table, block, begin, end, positions, prefix,
    slopes, scale, stride_key_block, stride_value_block, BLOCK_ROWS: tl.constexpr, SIZE: tl.constexpr,
    PART1: tl.constexpr, PART2: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PART1: tl.constexpr, VALUE_PART2: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, PAIRED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Take keys begin : end into the running softmax (acc, highest score, total weight). `block`: the first tile's, where it is known.

    No query sees a key past `end`; MASKED: not every query sees every key before it either.
    `keys` and `values` point to this head's first page; values None: the keys are the values too. With tensor descriptors of the
    whole caches ([blocks × BLOCK_ROWS, SIZE]; this head's rows start at `page_row` of each block), a tile is one bulk copy.
    PAIRED: pages are int16 pairs of 8-bit features (see `attention_pairs`), and part 1 is their low bytes, part 2 the high ones.
    `means` (or None): see `mean_scores`; then `begin` is a multiple of BLOCK_N, and no tile has keys of two rows of them.
    """
    STEP: tl.constexpr = 1 if PAIRED is None else 2
    missing = tl.zeros([q1.shape[0]], tl.float32)
    if block is None:
        block = blocks_of(table, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        # One tile ahead: were keys and block ids loaded in one iteration, the pipeliner would spend its stages on the ids.
        next_block = blocks_of(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        inside = None
        if MASKED:
            inside = key < end
        rows = page_rows(keys, block, start, stride_key_block, SIZE, BLOCK_SIZE, BLOCK_N)
        if PAIRED is not None:
            k1, k2 = halves(load_part(rows, 0, PART1, SIZE, inside), PAIRED, PACKED)
        elif key_pages is None:
            k1 = load_part(rows, 0, PART1, SIZE, inside).to(q1.dtype)
        else:
            k1 = key_pages.load([block * BLOCK_ROWS + page_row + start % BLOCK_SIZE, 0]).to(q1.dtype)
        if means is None:
            scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        else:
            if (start == begin) | (start % mean_tokens() == 0):
                missing = mean_scores(q1, q2, means, start, SIZE * STEP, PART1, PART2, PRECISION, PAIRED)
            scores = tl.where(key[None, :] > 0, missing[:, None], 0.0)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
        if PART2 > 0:
            if PAIRED is None:
                k2 = load_part(rows, PART1, PART2, SIZE, inside).to(q1.dtype)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        if SOFTCAP is not None:
            scores = tanh(scores * (scale / SOFTCAP)) * (SOFTCAP * LOG2E)
        if slopes is not None:
            if SOFTCAP is None:
                scores = scores * (scale * LOG2E)
            scores += slopes[:, None] * (key[None, :] - positions[:, None]).to(tl.float32)
        factor = 1.0
        if SOFTCAP is None and slopes is None:
            factor = scale * LOG2E
        if MASKED:
            # -inf scaled first: a finite stand-in times the factor would differ from the running maximum by its rounding.
            seen = is_visible(key[None, :], positions[:, None], end, prefix, WINDOW, CHUNK)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - raised[:, None])
        fade = tl.exp2(highest - raised)
        total = total * fade + tl.sum(weights, 1)
        highest = raised
        weights = weights.to(q1.dtype)
        if values is None:
            v1 = k1
        elif value_pages is not None:
            v1 = value_pages.load([block * BLOCK_ROWS + page_row + start % BLOCK_SIZE, 0]).to(q1.dtype)
        else:
            value_rows = page_rows(values, block, start, stride_value_block, VALUE_SIZE, BLOCK_SIZE, BLOCK_N)
            if PAIRED is not None:
                v1, v2 = halves(load_part(value_rows, 0, VALUE_PART1, VALUE_SIZE, inside), PAIRED, PACKED)
            else:
                v1 = as_operand(load_part(value_rows, 0, VALUE_PART1, VALUE_SIZE, inside), q1.dtype)
        acc1 = tl.dot(weights, v1, acc1 * fade[:, None], input_precision=PRECISION)
        if VALUE_PART2 > 0:
            if values is None:
                v2 = k2
            elif PAIRED is None:
                v2 = as_operand(load_part(value_rows, VALUE_PART1, VALUE_PART2, VALUE_SIZE, inside), q1.dtype)
            acc2 = tl.dot(weights, v2, acc2 * fade[:, None], input_precision=PRECISION)
        block = next_block
    return acc1, acc2, highest, total


@triton.jit
def store_part(rows, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, inside):
    cols = FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(rows[:, None] + cols, x.to(rows.dtype.element_ty), mask=inside[:, None] & (cols < SIZE))


@triton.jit
def store_head(rows, x1, x2, PART1: tl.constexpr, PART2: tl.constexpr, SIZE: tl.constexpr, inside, PAIRED: tl.constexpr):
    """Both parts of a head's features: one after the other, or one by one in turn."""
    if PAIRED:
        store_part(rows, tl.reshape(tl.join(x1, x2), (x1.shape[0], 2 * PART1)), 0, 2 * PART1, SIZE, inside)
    else:
        store_part(rows, x1, 0, PART1, SIZE, inside)
        if PART2 > 0:
            store_part(rows, x2, PART1, PART2, SIZE, inside)


@triton.jit
def load_splits(partial, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """One part of the features of every split of some rows, [splits, rows, WIDTH]. `partial` [splits, rows] are pointers."""
    cols = FIRST + tl.arange(0, WIDTH)[None, None, :]
    return tl.load(partial[:, :, None] + cols, mask=inside[:, :, None] & (cols < SIZE), other=0.0)
