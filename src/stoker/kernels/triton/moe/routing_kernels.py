"""Routing kernels of a mixture of experts. No value returns to the host, so that CUDA graphs can record a step.

    choose_experts_kernel    router logits -> for each token the TOP_K best experts and their weights
    sort_choices_kernel      choices -> sorted by expert (a counting sort: stable, so that an expert's choices are in the order of tokens)
    combine_kernel           results of the choices -> Σ weight × result for each token, + residual
    clipped_gate_kernel      (clip(up) + 1) × clip(gate) × sigmoid(alpha × clip(gate))

    choice t × TOP_K + i: the i-th expert of token t             e.g. TOP_K = 2, experts 0-2
    ids       [tokens, TOP_K]     2 0 | 0 1 | 2 1
    order     [tokens × TOP_K]    1 2 | 3 5 | 0 4                choices of expert 0, of expert 1, of expert 2
    offsets   [experts + 1]       0     2     4     6

Theoretical floor: the bytes read and written at the speed of memory; in decode steps each kernel takes as long as a launch. Not measured
by themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def largest_and_index(x, index):
    """(largest element of x [G, S], the lowest value of `index` [G, S] at which it occurs); the index is too large if x has a NaN."""
    largest = tl.max(tl.max(x, 1), 0)
    return largest, tl.min(tl.min(tl.where(x == largest, index, 1 << 30), 1), 0)


@triton.jit
def best_groups(scores, inside, group, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """bool [G]: True for the TOP_GROUPS groups with the highest scores. scores [G, S].

    A group's score is that of its best expert or, with TOP2, the sum of its two best. `group` are the indices of groups.
    """
    group_score = tl.max(scores, 1)
    if TOP2:
        column = tl.arange(0, scores.shape[1])[None, :]
        first = tl.min(tl.where(scores == group_score[:, None], column, 1 << 30), 1)
        group_score += tl.max(tl.where(column == first[:, None], float("-inf"), scores), 1)
    group_score = tl.where(inside, group_score, float("-inf"))
    chosen = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        remaining = tl.where(chosen, float("-inf"), group_score)
        best = tl.max(remaining, 0)
        chosen = chosen | (group == tl.min(tl.where((remaining == best) & (chosen == 0) & inside, group, 1 << 30), 0))
    return chosen


@triton.jit
def choose_experts_kernel(
    # Pointers
    logits_ptr,  # [tokens, NUM_EXPERTS]
    correction_ptr,  # [NUM_EXPERTS], added to the scores for the choice only; or None
    weights_ptr,  # float32 [tokens, TOP_K]
    ids_ptr,  # int32 [tokens, TOP_K]
    # Numbers
    scale,  # of the weights
    jitter,  # sparsemixer: see `RoutingParams`
    # Constants
    SCORE: tl.constexpr,  # "softmax", "sigmoid", "softmax_topk" or "sparsemixer"
    RENORMALIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,  # NUM_GROUPS, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,  # experts of a group, likewise
    BLOCK_K: tl.constexpr,  # TOP_K, likewise
    USE_PDL: tl.constexpr,
):
    """One CTA: choose the experts of one token. Tiles are [BLOCK_GROUPS, BLOCK_SIZE]: groups × experts of a group."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group = tl.arange(0, BLOCK_GROUPS)
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    expert_index = group[:, None] * SIZE + column
    inside = (group < NUM_GROUPS)[:, None] & (column < SIZE)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    x = tl.load(logits_ptr + token * NUM_EXPERTS + expert_index, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == "sigmoid":
        scores = tl.sigmoid(x)
    elif SCORE == "softmax":
        scores = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = x
    choice_scores = scores
    if correction_ptr is not None:  # noqa: SIM102 - a pointer that is None, then a constant
        if SCORE != "softmax_topk" and SCORE != "sparsemixer":
            choice_scores = choice_scores + tl.load(correction_ptr + expert_index, mask=inside, other=0.0)
    choice_scores = tl.where(inside, choice_scores, float("-inf"))
    if NUM_GROUPS > 1:
        allowed = best_groups(choice_scores, group < NUM_GROUPS, group, TOP_GROUPS, TOP2)
        choice_scores = tl.where(allowed[:, None], choice_scores, float("-inf"))
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.full([BLOCK_K], float("-inf"), tl.float32)
    available = inside
    for i in tl.static_range(TOP_K):
        candidates = tl.where(available, choice_scores, float("-inf"))
        best, expert = largest_and_index(candidates, tl.where(available, expert_index, 1 << 30))
        expert = tl.minimum(expert, NUM_EXPERTS - 1)
        weight = tl.sum(tl.sum(tl.where(expert_index == expert, scores, 0.0), 1), 0)
        if SCORE == "sparsemixer":  # the softmax of the best of the available logits that are near it
            distance = (best - scores) / tl.maximum(tl.abs(scores), best)
            near = tl.where(distance > 2.0 * jitter, float("-inf"), candidates)
            weight = 1.0 / tl.sum(tl.sum(tl.exp(near - best), 1), 0)
        weight = tl.where(best == best, weight, best)  # NaN stays NaN
        ids = tl.where(slot == i, expert, ids)
        weights = tl.where(slot == i, weight, weights)
        available = available & (expert_index != expert)
    if SCORE == "softmax_topk":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    else:
        weights = tl.where(slot < TOP_K, weights, 0.0)
        if RENORMALIZE:
            weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weights_ptr + token * TOP_K + slot, weights * scale, mask=slot < TOP_K)
    tl.store(ids_ptr + token * TOP_K + slot, ids, mask=slot < TOP_K)


@triton.jit(do_not_specialize=["num_choices"])
def sort_choices_kernel(
    ids_ptr,  # int32 [num_choices]
    order_ptr,  # int32 [num_choices]
    offsets_ptr,  # int32 [experts + 1]
    num_choices,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA per expert writes the expert's offset and its choices in order. One more CTA writes the last offset."""
    expert = tl.program_id(0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        before += (tl.load(ids_ptr + choice, mask=choice < num_choices, other=1 << 30) < expert).to(tl.int32)
    offset = tl.sum(before, 0)
    tl.store(offsets_ptr + expert, offset)
    for start in range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        is_chosen = (tl.load(ids_ptr + choice, mask=choice < num_choices, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + offset + tl.cumsum(is_chosen, 0) - 1, choice, mask=is_chosen > 0)
        offset += tl.sum(is_chosen, 0)


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


@triton.jit
def clipped_gate_kernel(
    gate_up_ptr,  # [rows, 2 × size]: gates, then ups
    out_ptr,  # [rows, size]
    size,
    limit,
    alpha,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: BLOCK results of one row. Gates are clipped from above only, the other half on both sides."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    gate = tl.load(gate_up_ptr + row * 2 * size + cols, mask=cols < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + cols, mask=cols < size, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    tl.store(out_ptr + row * size + cols, result.to(out_ptr.dtype.element_ty), mask=cols < size)
