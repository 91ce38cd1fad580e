"""Choosing experts and sorting the choices by expert, without a value that the host would have to read."""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def best_of(x, number):
    """(largest of x [G, S], the lowest number that has it; past all numbers when x is NaN)."""
    best = tl.max(tl.max(x, 1), 0)
    return best, tl.min(tl.min(tl.where(x == best, number, 1 << 30), 1), 0)


@triton.jit
def best_groups(wanted, inside, lane, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """bool [G]: the groups of experts that may be chosen from. A group's score is its best, or the sum of its two best."""
    score = tl.max(wanted, 1)
    if TOP2:
        column = tl.arange(0, wanted.shape[1])[None, :]
        first = tl.min(tl.where(wanted == score[:, None], column, 1 << 30), 1)
        score += tl.max(tl.where(column == first[:, None], float("-inf"), wanted), 1)
    score = tl.where(inside, score, float("-inf"))
    allowed = lane < 0
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(allowed, float("-inf"), score)
        best = tl.max(left, 0)
        allowed = allowed | (lane == tl.min(tl.where((left == best) & (allowed == 0) & inside, lane, 1 << 30), 0))
    return allowed


@triton.jit
def choose_kernel(
    logits, correction, weights, ids, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, scale, NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program: one token. Experts lie as [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    lane = tl.arange(0, BLOCK_GROUPS)
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    number = lane[:, None] * SIZE + column
    inside = (lane < NUM_GROUPS)[:, None] & (column < SIZE)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    x = tl.load(logits + token * NUM_EXPERTS + number, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == "sigmoid":
        scores = tl.sigmoid(x)
    elif SCORE == "softmax":
        scores = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = x
    wanted = scores
    if correction is not None:  # noqa: SIM102 - a pointer that is None, then a constant
        if SCORE != "softmax_topk":
            wanted = wanted + tl.load(correction + number, mask=inside, other=0.0)
    wanted = tl.where(inside, wanted, float("-inf"))
    if NUM_GROUPS > 1:
        allowed = best_groups(wanted, lane < NUM_GROUPS, lane, TOP_GROUPS, TOP2)
        wanted = tl.where(allowed[:, None], wanted, float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    values = tl.full([BLOCK_K], float("-inf"), tl.float32)
    free = inside
    for i in tl.static_range(TOP_K):
        best, expert = best_of(tl.where(free, wanted, float("-inf")), tl.where(free, number, 1 << 30))
        expert = tl.minimum(expert, NUM_EXPERTS - 1)
        value = tl.sum(tl.sum(tl.where(number == expert, scores, 0.0), 1), 0)
        value = tl.where(best == best, value, best)
        chosen = tl.where(place == i, expert, chosen)
        values = tl.where(place == i, value, values)
        free = free & (number != expert)
    if SCORE == "softmax_topk":
        values = tl.exp(values - tl.max(values, 0))
        values = values / tl.sum(values, 0)
    else:
        values = tl.where(place < TOP_K, values, 0.0)
        if RENORMALIZE:
            values = values / (tl.sum(values, 0) + 1e-20)
    tl.store(weights + token * TOP_K + place, values * scale, mask=place < TOP_K)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)


@triton.jit(do_not_specialize=["count"])
def sort_kernel(ids, order, offsets, count, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program: one expert's choices among `count`, in their order. The one past the last expert writes the end."""
    expert = tl.program_id(0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        before += (tl.load(ids + choice, mask=choice < count, other=1 << 30) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(offsets + expert, place)
    for start in range(0, count, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids + choice, mask=choice < count, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, choice, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit
def combine_kernel(y, places, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program: BLOCK features of a token's weighted sum over its choices, in their order. Rows of y are choices, or at `places`."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        choice = token * TOP_K + i
        row = choice
        if places is not None:
            row = tl.load(places + choice).to(tl.int64)
        part = tl.load(y + row * size + cols, mask=cols < size, other=0.0).to(tl.float32)
        total += part * tl.load(weights + choice)
    tl.store(out + token * size + cols, total.to(out.dtype.element_ty), mask=cols < size)


@triton.jit
def clipped_gate_kernel(gate_up, out, size, limit, alpha, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program: BLOCK of a row's results. A row of gate_up holds `size` gates, then as many multiplicands."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    gate = tl.load(gate_up + row * 2 * size + cols, mask=cols < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + cols, mask=cols < size, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * size + cols, ((up + 1.0) * gate * tl.sigmoid(alpha * gate)).to(out.dtype.element_ty), mask=cols < size)
