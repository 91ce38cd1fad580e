"""Routing kernels of a mixture of experts. No value returns to the host, so that CUDA graphs can record a step.

    choose_experts_kernel    router logits -> for each token the top_k best experts and their weights; for few tokens also sorted by expert
    sort_choices_kernel      choices -> sorted by expert (a counting sort: stable, so that an expert's choices are in the order of tokens)
    invert_order_kernel      order -> for each choice, its place in the order
    combine_kernel           results of the choices -> Σ weight × result for each token, + residual

    choice t × TOP_K + i: the i-th expert of token t             e.g. TOP_K = 2, experts 0-2
    ids       [tokens, TOP_K]     2 0 | 0 1 | 2 1
    order     [tokens × TOP_K]    1 2 | 3 5 | 0 4                choices of expert 0, of expert 1, of expert 2
    offsets   [experts + 1]       0     2     4     6

Theoretical floor: the bytes read and written at the speed of memory; in decode steps each kernel takes as long as a launch. Choice and sort
of 448 tokens (8 of 128 experts) take 4.4 µs together, and 16 µs each for 8,192 tokens (benchmarks/results/h200_router_slices.json).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait

NO_KEY = tl.constexpr(-(1 << 31))  # less than each key of `order_keys`


class RoutingOptions(NamedTuple):
    """Constants: how experts are chosen. The fields of `RoutingParams` that are not numbers of a launch, and the number of experts."""

    num_experts: int
    top_k: int
    score: str  # "softmax", "sigmoid", "softmax_topk" or "sparsemixer"
    renormalize: bool
    num_groups: int
    top_groups: int
    top2: bool
    block_groups: int  # num_groups, rounded up to a power of two
    block_size: int  # experts of a group, likewise
    block_k: int  # top_k, likewise
    slices: int  # logits are the sums of this number of slices


@triton.jit
def order_keys(x):
    """int32: keys in the order of float32 x, equal for both zeros; that of NaN is lower than all others, but more than NO_KEY.

    The GPU reduces integers of a warp with one instruction, floats with five shuffles and five comparisons.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_KEY + 1)


@triton.jit
def value_of_key(key):
    """float32: the x of a key of `order_keys`; NaN for that of NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_expert(keys, index):
    """(int32 [T] the largest of the keys [T, G, S] of a token, int32 [T] the lowest index of those that equal it)."""
    if keys.shape[1] == 1:
        best = tl.max(tl.max(keys, 2), 1)
        return best, tl.min(tl.min(tl.where(keys == best[:, None, None], index, 1 << 30), 2), 1)
    else:  # the experts of all groups in one reduction, of all threads of a warp
        FLAT: tl.constexpr = (keys.shape[0], keys.shape[1] * keys.shape[2])
        best = tl.max(tl.reshape(keys, FLAT), 1)
        return best, tl.min(tl.reshape(tl.where(keys == best[:, None, None], index, 1 << 30), FLAT), 1)


@triton.jit
def best_groups(scores, inside, group, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """bool [T, G]: True for the TOP_GROUPS groups with the highest scores. scores [T, G, S].

    A group's score is that of its best expert or, with TOP2, the sum of its two best. `group` [1, G] are the indices of groups.
    """
    group_score = tl.max(scores, 2)
    if TOP2:
        column = tl.arange(0, scores.shape[2])[None, None, :]
        first = tl.min(tl.where(scores == group_score[:, :, None], column, 1 << 30), 2)
        group_score += tl.max(tl.where(column == first[:, :, None], float("-inf"), scores), 2)
    group_score = tl.where(inside, group_score, float("-inf"))
    chosen = (group_score != group_score) & (group < 0)
    for _ in tl.static_range(TOP_GROUPS):
        remaining = tl.where(chosen, float("-inf"), group_score)
        best = tl.max(remaining, 1)
        is_best = (remaining == best[:, None]) & (chosen == 0) & inside
        chosen = chosen | (group == tl.min(tl.where(is_best, group, 1 << 30), 1)[:, None])
    return chosen


@triton.jit
def choose_experts(
    x,  # float32 [T, BLOCK_GROUPS, BLOCK_SIZE]: logits
    inside,  # bool [1, BLOCK_GROUPS, BLOCK_SIZE]: elements that are experts
    expert_index,  # int32 [1, BLOCK_GROUPS, BLOCK_SIZE]
    correction_ptr,
    scale,
    jitter,
    OPTIONS: tl.constexpr,  # RoutingOptions
):
    """(int32 ids [T, BLOCK_K], float32 weights [T, BLOCK_K], int32 slots [T, BLOCK_GROUPS, BLOCK_SIZE]) of the experts of T tokens.

    slots: i where an expert is the i-th one of a token, and -1 where it is not chosen.
    """
    SCORE: tl.constexpr = OPTIONS.score
    TOP_K: tl.constexpr = OPTIONS.top_k
    BLOCK_K: tl.constexpr = OPTIONS.block_k
    TOKENS: tl.constexpr = x.shape[0]
    if SCORE == "sigmoid":
        scores = tl.sigmoid(x)
    elif SCORE == "softmax":
        scores = tl.exp(x - tl.max(tl.max(x, 2), 1)[:, None, None])
        scores = scores / tl.sum(tl.sum(scores, 2), 1)[:, None, None]
    else:
        scores = x
    choice_scores = scores
    if correction_ptr is not None:  # noqa: SIM102 - a pointer that is None, then a constant
        if SCORE != "softmax_topk" and SCORE != "sparsemixer":
            choice_scores = choice_scores + tl.load(correction_ptr + expert_index, mask=inside, other=0.0)
    choice_scores = tl.where(inside, choice_scores, float("-inf"))
    if OPTIONS.num_groups > 1:
        group = tl.arange(0, OPTIONS.block_groups)[None, :]
        allowed = best_groups(choice_scores, group < OPTIONS.num_groups, group, OPTIONS.top_groups, OPTIONS.top2)
        choice_scores = tl.where(allowed[:, :, None], choice_scores, float("-inf"))
    keys = tl.where(inside, order_keys(choice_scores), NO_KEY)  # of experts that are not chosen yet
    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([TOKENS, BLOCK_K], tl.int32)
    weights = tl.full([TOKENS, BLOCK_K], float("-inf"), tl.float32)
    slots = tl.full(x.shape, -1, tl.int32)
    for i in tl.static_range(TOP_K):
        best_key, expert = best_expert(keys, expert_index)
        is_expert = inside & (expert_index == expert[:, None, None])
        best = value_of_key(best_key)
        if correction_ptr is None and OPTIONS.num_groups == 1:
            weight = best
        else:
            weight = tl.sum(tl.sum(tl.where(is_expert, scores, 0.0), 2), 1)
            weight = tl.where(best == best, weight, best)  # NaN stays NaN
        if SCORE == "sparsemixer":  # the softmax of the best of the available logits that are near it
            distance = (best[:, None, None] - scores) / tl.maximum(tl.abs(scores), best[:, None, None])
            near = tl.where((keys == NO_KEY) | (distance > 2.0 * jitter), float("-inf"), choice_scores)
            weight = 1.0 / tl.sum(tl.sum(tl.exp(near - best[:, None, None]), 2), 1)
        keys = tl.where(is_expert, NO_KEY, keys)
        ids = tl.where(slot == i, expert[:, None], ids)
        weights = tl.where(slot == i, weight[:, None], weights)
        slots = tl.where(is_expert, i, slots)
    if SCORE == "softmax_topk":
        weights = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    else:
        weights = tl.where(slot < TOP_K, weights, 0.0)
        if OPTIONS.renormalize:
            weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    return ids, weights * scale, slots


@triton.jit(do_not_specialize=["tokens"])
def choose_experts_kernel(
    # Pointers
    logits_ptr,  # [slices, tokens, experts]
    correction_ptr,  # [experts], added to the scores for the choice only; or None
    weights_ptr,  # float32 [tokens, top_k]
    ids_ptr,  # int16 [tokens, top_k]; or None
    order_ptr,  # int32 [tokens × top_k]; or None with ids
    offsets_ptr,  # int32 [experts + 1]; or None with ids
    experts_ptr,  # int32 [top_k]: the experts of one token in ascending order; or None
    # Numbers
    tokens,
    scale,  # of the weights
    jitter,  # sparsemixer: see `RoutingParams`
    # Constants
    TOKENS: tl.constexpr,  # of a CTA
    OPTIONS: tl.constexpr,  # RoutingOptions
    USE_PDL: tl.constexpr,
):
    """One CTA: choose the experts of TOKENS tokens, and store their ids, or sort the choices of all tokens of the step."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    store_choices(
        logits_ptr, correction_ptr, weights_ptr, ids_ptr, order_ptr, offsets_ptr, experts_ptr, token, tokens, scale, jitter, OPTIONS
    )


@triton.jit
def store_choices(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    ids_ptr,
    order_ptr,
    offsets_ptr,
    experts_ptr,
    token,  # int32 [T]: the tokens of this CTA
    tokens,
    scale,
    jitter,
    OPTIONS: tl.constexpr,
):
    """Choose the experts of tokens and store the weights, and the ids or the order: see `choose_experts_kernel` for the arguments."""
    is_token = token < tokens
    ids, slots, expert_index, inside = choose_and_store_weights(
        logits_ptr, correction_ptr, weights_ptr, token, is_token, tokens, scale, jitter, OPTIONS
    )
    if ids_ptr is not None:
        slot = tl.arange(0, OPTIONS.block_k)[None, :]
        choice = token.to(tl.int64)[:, None] * OPTIONS.top_k + slot
        tl.store(ids_ptr + choice, ids, mask=is_token[:, None] & (slot < OPTIONS.top_k))
    else:
        sort_choices(
            slots, token[:, None, None], is_token[:, None, None], inside, expert_index, order_ptr, offsets_ptr, experts_ptr, OPTIONS
        )


@triton.jit
def choose_and_store_weights(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    token,  # int32 [T]
    is_token,  # bool [T]: False where weights are not stored
    tokens,
    scale,
    jitter,
    OPTIONS: tl.constexpr,
):
    """Choose the experts of tokens and store their weights. Returns (ids, slots, expert_index, inside), as `choose_experts` has them.

    Tiles are [T, BLOCK_GROUPS, BLOCK_SIZE]: tokens × groups × experts of a group.
    """
    NUM_EXPERTS: tl.constexpr = OPTIONS.num_experts
    SIZE: tl.constexpr = NUM_EXPERTS // OPTIONS.num_groups
    group = tl.arange(0, OPTIONS.block_groups)[None, :, None]
    column = tl.arange(0, OPTIONS.block_size)[None, None, :]
    expert_index = group * SIZE + column
    inside = (group < OPTIONS.num_groups) & (column < SIZE)
    row = tl.minimum(token, tokens - 1).to(tl.int64)[:, None, None]
    x = tl.load(logits_ptr + row * NUM_EXPERTS + expert_index, mask=inside, other=float("-inf")).to(tl.float32)
    SLICES: tl.constexpr = OPTIONS.slices
    for _ in tl.static_range(1, SLICES):
        row += tokens
        x += tl.load(logits_ptr + row * NUM_EXPERTS + expert_index, mask=inside, other=0.0)
    ids, weights, slots = choose_experts(x, inside, expert_index, correction_ptr, scale, jitter, OPTIONS)
    slot = tl.arange(0, OPTIONS.block_k)[None, :]
    choice = token.to(tl.int64)[:, None] * OPTIONS.top_k + slot
    tl.store(weights_ptr + choice, weights, mask=is_token[:, None] & (slot < OPTIONS.top_k))
    return ids, slots, expert_index, inside


@triton.jit
def sort_choices(
    slots,  # int32 [T, BLOCK_GROUPS, BLOCK_SIZE]: see `choose_experts`
    token,  # int32 [T, 1, 1]
    is_token,  # bool [T, 1, 1]
    inside,  # bool [1, BLOCK_GROUPS, BLOCK_SIZE]
    expert_index,  # int32 [1, BLOCK_GROUPS, BLOCK_SIZE]
    order_ptr,
    offsets_ptr,
    experts_ptr,
    OPTIONS: tl.constexpr,
):
    """Store the order and the offsets of the choices of all tokens of a step.

    A choice is placed after those of all lower experts, and after those of earlier tokens of the same expert.
    """
    GROUPS: tl.constexpr = OPTIONS.block_groups
    SIZE: tl.constexpr = OPTIONS.block_size
    is_chosen = is_token & (slots >= 0)
    count = is_chosen.to(tl.int32)
    by_expert = tl.sum(count, 0)  # [GROUPS, SIZE]
    ends = tl.reshape(tl.cumsum(tl.reshape(by_expert, [GROUPS * SIZE]), 0), [1, GROUPS, SIZE])
    offsets = ends - by_expert[None, :, :]
    tl.store(offsets_ptr + expert_index, offsets, mask=inside)
    tl.store(offsets_ptr + 1 + expert_index, ends, mask=inside & (expert_index == OPTIONS.num_experts - 1))
    place = offsets + tl.cumsum(count, 0) - 1
    tl.store(order_ptr + place, token * OPTIONS.top_k + slots, mask=is_chosen)
    if experts_ptr is not None:
        tl.store(experts_ptr + place, tl.broadcast_to(expert_index, place.shape), mask=is_chosen)


@triton.jit(do_not_specialize=["tokens"])
def sort_choices_kernel(
    ids_ptr,  # int16 [tokens × TOP_K]
    order_ptr,  # int32 [tokens × TOP_K]
    offsets_ptr,  # int32 [experts + 1]
    tokens,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,  # 8 × ROWS choices are sorted at a time
    IS_WHOLE: tl.constexpr,  # whether these are all choices, so that they are read once
    USE_PDL: tl.constexpr,
):
    """One CTA per expert writes the expert's offset and its choices in order. One more CTA writes the last offset.

    A thread has rows of eight choices, so that only the counts of rows are added across threads.
    """
    expert = tl.program_id(0)
    num_choices = tokens * TOP_K  # a multiple of TOP_K for the compiler, which may then load several choices at a time
    choice = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    ids = tl.load(ids_ptr + choice, mask=choice < num_choices, other=32767)
    before = tl.sum((ids < expert).to(tl.int32), 1)
    if not IS_WHOLE:
        for start in range(ROWS * 8, num_choices, ROWS * 8):
            others = tl.load(ids_ptr + start + choice, mask=start + choice < num_choices, other=32767)
            before += tl.sum((others < expert).to(tl.int32), 1)
    offset = tl.sum(before, 0)
    tl.store(offsets_ptr + expert, offset)
    offset += place_block(ids, choice, offset, expert, order_ptr)
    if not IS_WHOLE:
        for start in range(ROWS * 8, num_choices, ROWS * 8):
            ids = tl.load(ids_ptr + start + choice, mask=start + choice < num_choices, other=32767)
            offset += place_block(ids, start + choice, offset, expert, order_ptr)


@triton.jit
def place_block(ids, choice, offset, expert, order_ptr):
    """Store the choices [ROWS, 8] of an expert from `offset` on, and return how many they are."""
    is_chosen = ids == expert
    within = tl.cumsum(is_chosen.to(tl.int32), 1)
    count = tl.sum(is_chosen.to(tl.int32), 1)  # [ROWS]
    place = offset + (tl.cumsum(count, 0) - count)[:, None] + within - 1
    tl.store(order_ptr + place, choice, mask=is_chosen)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_choices"])
def invert_order_kernel(
    order_ptr,  # int32 [num_choices]
    places_ptr,  # int32 [num_choices]
    num_choices,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: store BLOCK places of choices, those of the choices at these places of the order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    choice = tl.load(order_ptr + place, mask=place < num_choices, other=0)
    tl.store(places_ptr + choice, place, mask=place < num_choices)


@triton.jit
def combine_kernel(
    y_ptr,  # [choices, size]
    rows_ptr,  # int32 [choices]: the row of y of each choice; None: row c is choice c
    weights_ptr,  # float32 [tokens, TOP_K]
    residual_ptr,  # [tokens, size] or None
    out_ptr,  # [tokens, size]
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK features of one token. Its choices are added in their order.

    Their sum is rounded before the residual is added, so that results equal those of two launches.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        choice = token * TOP_K + i
        row = choice
        if rows_ptr is not None:
            row = tl.load(rows_ptr + choice).to(tl.int64)
        y = tl.load(y_ptr + row * size + cols, mask=cols < size, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + choice)
    if residual_ptr is not None:
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        total += tl.load(residual_ptr + token * size + cols, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + cols, total.to(out_ptr.dtype.element_ty), mask=cols < size)
