"""The inner loop of attention: scores, online softmax and weighted values of one query tile over a range of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import tanh
from stoker.kernels.triton.attention.arguments import SoftmaxState
from stoker.kernels.triton.attention.key_tile import as_value_operand, block_ids, load_part, page_rows
from stoker.kernels.triton.attention.paired_8bit import unpack_pairs
from stoker.kernels.triton.attention.query_tile import LOG2E, is_visible
from stoker.kernels.triton.kv_pages import mean_tokens


@triton.jit
def mean_scores(q1, q2, means_ptr, start, SHAPE: tl.constexpr, FORMAT: tl.constexpr):
    """float32 [M]: the products of the queries with the mean that was subtracted from the keys around position `start`.

    `q1` and `q2` are the two parts of the queries, `means_ptr` is that of `HeadPages`. Heads have one part here, or are read in pairs.
    """
    STEP: tl.constexpr = 1 if FORMAT.pairs is None else 2
    PRECISION: tl.constexpr = FORMAT.precision
    # 16 equal rows, the smallest side of a matrix instruction's tile.
    rows = means_ptr + start // mean_tokens() * SHAPE.size + tl.zeros([16], tl.int32)
    mean1 = load_part(rows, 0, SHAPE.part1, SHAPE.size, None, STEP)
    scores = tl.dot(q1, tl.trans(mean1.to(q1.dtype)), input_precision=PRECISION)
    if FORMAT.pairs is not None:
        mean2 = load_part(rows, 1, SHAPE.part2, SHAPE.size, None, STEP)
        scores = tl.dot(q2, tl.trans(mean2.to(q1.dtype)), scores, input_precision=PRECISION)
    return tl.max(scores, 1)


@triton.jit
def attend(
    # The query tile
    state,  # SoftmaxState
    q1,  # [M, part1]
    q2,  # [M, part2]
    positions,  # int32 [M]
    # Keys to attend to
    pages,  # HeadPages
    first_block,  # the block ids of the first key tile, or None: not loaded yet
    begin,
    end,
    prefix,  # or None
    tree,  # TreeRows or None
    slopes,  # ALiBi: float32 [M] in units of log2(e), or None
    scale,
    SHAPE: tl.constexpr,  # HeadShape
    TILE: tl.constexpr,  # QueryTile
    OPTIONS: tl.constexpr,  # ScoreOptions
    FORMAT: tl.constexpr,  # OperandFormat
    MASKED: tl.constexpr,  # False: every row sees every key of the range
):
    """Add keys begin : end to the running softmax. No row sees a key from `end` on.

    For each tile of N keys, with f = scale × log2(e):

        scores   [M, N] = q [M, size] × keys [N, size]ᵀ        -inf where masked
        raised   [M]    = max(highest, max over N of scores × f)
        weights  [M, N] = exp2(scores × f - raised)
        acc             = acc × exp2(highest - raised) + weights × values [N, value_size]
        total           = total × exp2(highest - raised) + sum over N of weights

    With `FORMAT.pairs`, pages are read as int16 pairs of 8-bit features (see `paired_8bit`): part 1 is their low bytes, part 2 their high
    bytes. With `pages.means_ptr`, `begin` is a multiple of BLOCK_N and no tile has keys of two rows of means.
    """
    acc1, acc2, highest, total = state
    STEP: tl.constexpr = 1 if FORMAT.pairs is None else 2  # features per element of a page
    PAIRS: tl.constexpr = FORMAT.pairs
    PRECISION: tl.constexpr = FORMAT.precision
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    SIZE: tl.constexpr = SHAPE.size // STEP
    VALUE_SIZE: tl.constexpr = SHAPE.value_size // STEP
    stride_key_block = pages.stride_key_block // STEP
    stride_value_block = pages.stride_value_block // STEP
    keys_ptr = pages.keys_ptr
    values_ptr = pages.values_ptr
    means_ptr = pages.means_ptr
    block_table_ptr = pages.block_table_ptr
    if PAIRS is not None:
        keys_ptr = keys_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        values_ptr = values_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    mean_score = tl.zeros([q1.shape[0]], tl.float32)
    block = first_block
    if block is None:
        block = block_ids(block_table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        # One tile ahead: with keys and block ids loaded in one iteration, the pipeliner would spend its stages on the ids.
        next_block = block_ids(block_table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        inside = None
        if MASKED:
            inside = key < end
        key_rows = page_rows(keys_ptr, block, start, stride_key_block, SIZE, BLOCK_SIZE, BLOCK_N)
        if PAIRS is not None:
            k1, k2 = unpack_pairs(load_part(key_rows, 0, SHAPE.part1, SIZE, inside), FORMAT)  # [N, part1], [N, part2]
        else:
            k1 = load_part(key_rows, 0, SHAPE.part1, SIZE, inside).to(q1.dtype)  # [N, part1]
        if means_ptr is None:
            scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)  # [M, N]
        else:
            if (start == begin) | (start % mean_tokens() == 0):
                mean_score = mean_scores(q1, q2, means_ptr, start, SHAPE, FORMAT)
            scores = tl.where(key[None, :] > 0, mean_score[:, None], 0.0)  # the first key of a sequence is stored whole
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
        if SHAPE.part2 > 0:
            if PAIRS is None:
                k2 = load_part(key_rows, SHAPE.part1, SHAPE.part2, SIZE, inside).to(q1.dtype)  # [N, part2]
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        if OPTIONS.softcap is not None:
            scores = tanh(scores * (scale / OPTIONS.softcap)) * (OPTIONS.softcap * LOG2E)
        if slopes is not None:
            if OPTIONS.softcap is None:
                scores = scores * (scale * LOG2E)
            scores += slopes[:, None] * (key[None, :] - positions[:, None]).to(tl.float32)
        factor = 1.0
        if OPTIONS.softcap is None and slopes is None:
            factor = scale * LOG2E
        if MASKED:
            # -inf, which scaling leaves as it is: a finite stand-in times the factor would differ from the running maximum by rounding.
            seen = is_visible(key[None, :], positions[:, None], end, prefix, tree, OPTIONS, TILE.tokens)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - raised[:, None])
        fade = tl.exp2(highest - raised)
        total = total * fade + tl.sum(weights, 1)
        highest = raised
        weights = weights.to(q1.dtype)
        if values_ptr is None:
            v1 = k1
        else:
            value_rows = page_rows(values_ptr, block, start, stride_value_block, VALUE_SIZE, BLOCK_SIZE, BLOCK_N)
            if PAIRS is not None:
                v1, v2 = unpack_pairs(load_part(value_rows, 0, SHAPE.value_part1, VALUE_SIZE, inside), FORMAT)
            else:
                v1 = as_value_operand(load_part(value_rows, 0, SHAPE.value_part1, VALUE_SIZE, inside), q1.dtype)  # [N, value_part1]
        acc1 = tl.dot(weights, v1, acc1 * fade[:, None], input_precision=PRECISION)
        if SHAPE.value_part2 > 0:
            if values_ptr is None:
                v2 = k2
            elif PAIRS is None:
                v2 = as_value_operand(load_part(value_rows, SHAPE.value_part1, SHAPE.value_part2, VALUE_SIZE, inside), q1.dtype)
            acc2 = tl.dot(weights, v2, acc2 * fade[:, None], input_precision=PRECISION)
        block = next_block
    return SoftmaxState(acc1, acc2, highest, total)
