"""Sampling on the GPU without a sort: temperature, top-k, top-p, min-p and the draw, for every row of logits.

For a row of logits z [V], with x = z ÷ temperature:

    greedy       argmax z (the smallest index among equals)
    min-p        keep tokens with x >= max x + ln(min_p)
    top-k        keep tokens with x >= the k-th largest x
    top-p        keep tokens with x >= the largest threshold whose tokens still have p of the probability that top-k keeps
    draw         the first kept token, in vocabulary order, at which the cumulative exp(x - max x) exceeds u × its total, with u from
                 (seed, counter)

Draft tokens are accepted by a third kernel, `verify_kernel`, with one CTA per sequence.

Two launches sample on one rank:

    partial_argmax_kernel    grid rows × chunks of 8,192 logits      row of logits | chunk 0 | chunk 1 | ... |
                             the largest logit of each chunk                           v         v
    draw_kernel              grid rows: largest of all chunks,       best, best_id [rows, chunks]
                             and for rows that are not greedy the thresholds and the draw, by passes over the row

A threshold is found by bisection over the 32 bits of an order-preserving integer image of float32 (`ordered_bits`): 32 exact passes over
a row that stays in L2, without scratch memory. Two passes more give the draw.

Ranks that hold shards of the vocabulary sample greedily without the logits of the others: `shard_pair_kernel` writes the largest logit of a
row and its token id, `ops.all_reduce` brings the pairs of all ranks together, and `largest_pair_kernel` compares them.

Theoretical floor: one read of the logits (greedy), 46 µs for 768 rows of 128,256 at 4.28 TB/s. Sampling by threshold reads them 34 to 67
times from L2. Greedy takes 53.8 µs on an H200, and 8.0 for 64 rows (floor 3.8); sampling was not measured by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from stoker.kernels.types import DrawParams

_CHUNK = 8192  # logits that one CTA of partial_argmax_kernel reads
_BLOCK = 4096  # logits that draw_kernel reads per iteration


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """Greedy or random token ids (`ops.sample`), by two launches."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    best, best_id = _largest_of_chunks(logits)
    chunks = best.shape[1]
    draw_kernel[(rows,)](
        logits,
        best,
        best_id,
        out,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seeds,
        params.counters,
        vocab,
        logits.stride(0),
        chunks,
        CHUNKS=next_power_of_2(chunks),
        BLOCK=_BLOCK,
        GREEDY=params.all_greedy,
        num_warps=8,
        **pdl_launch_options(logits),
    )
    return out


def largest_of_shard(logits: Tensor, num_ids: int, rank: int, num_ranks: int) -> Tensor:
    """The largest logits of a rank's shard and their token ids (`ops.sample_shards`), by two launches."""
    rows = logits.shape[0]
    pairs = torch.empty(rows, num_ranks, 2, dtype=torch.float32, device=logits.device)
    if rows:
        best, best_id = _largest_of_chunks(logits, num_ids)
        chunks = best.shape[1]
        shard_pair_kernel[(rows,)](
            best,
            best_id,
            pairs,
            rank,
            rank * logits.shape[1],
            chunks,
            CHUNKS=next_power_of_2(chunks),
            RANKS=num_ranks,
            PLACES=next_power_of_2(2 * num_ranks),
            num_warps=1,
            **pdl_launch_options(logits),
        )
    return pairs


def largest_over_ranks(pairs: Tensor) -> Tensor:
    """The token ids of the largest logits of all ranks (`ops.sample_shards`), by one launch."""
    out = torch.empty(len(pairs), dtype=torch.int32, device=pairs.device)
    if len(pairs):
        ranks = pairs.shape[1]
        largest_pair_kernel[(len(pairs),)](pairs, out, RANKS=ranks, PLACES=next_power_of_2(ranks), num_warps=1, **pdl_launch_options(pairs))
    return out


def _largest_of_chunks(logits: Tensor, num_ids: int | None = None) -> tuple[Tensor, Tensor]:
    """The largest logit of each chunk of a row, float32 [rows, chunks], and its place in the row, int32 [rows, chunks].

    `num_ids`: logits from this place on are padding; None: there is no padding.
    """
    rows, vocab = logits.shape
    chunks = cdiv(vocab, _CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    partial_argmax_kernel[(rows, chunks)](
        logits, best, best_id, vocab, num_ids, logits.stride(0), chunks, CHUNK=_CHUNK, num_warps=8, **pdl_launch_options(logits)
    )
    return best, best_id


def verify(
    sampled: Tensor, token_ids: Tensor, logits_idx: Tensor, starts: Tensor, parents: Tensor, masks: Tensor, max_drafts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept the drafts that equal the sampled tokens (`ops.verify`), in one launch."""
    count = len(starts) - 1
    ids = torch.empty(count, max_drafts + 1, dtype=torch.int32, device=sampled.device)
    num_accepted = torch.empty(count, dtype=torch.int32, device=sampled.device)
    newest, last = torch.empty_like(num_accepted), torch.empty_like(num_accepted)
    is_yielded = torch.zeros(len(sampled), dtype=torch.bool, device=sampled.device)
    if count:
        block = next_power_of_2(max_drafts + 1)
        verify_kernel[(count,)](
            sampled,
            token_ids,
            logits_idx,
            starts,
            parents,
            masks,
            ids,
            num_accepted,
            newest,
            last,
            is_yielded,
            COLUMNS=max_drafts + 1,
            BLOCK=block,
            num_warps=1 if block <= 16 else 4,
            **pdl_launch_options(sampled),
        )
    return ids, num_accepted, newest, last, is_yielded


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of the tokens `token_ids` and of the most probable tokens (`ops.logprobs`), by PyTorch."""
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1)
    chosen = wide.gather(1, token_ids.long().unsqueeze(1)).squeeze(1) - total
    best, ids = torch.topk(wide, num_top, dim=-1)
    return chosen, best - total[:, None], ids.to(torch.int32)


@triton.jit(do_not_specialize=["num_ids"])
def partial_argmax_kernel(
    logits_ptr,  # [rows, vocab]
    best_ptr,  # float32 [rows, chunks]: the largest logit of each chunk; NaN when one of them is NaN or +inf
    best_id_ptr,  # int32 [rows, chunks]: its token id, the smallest of equals; of a NaN, any number
    vocab,
    num_ids,  # logits from this place on are padding; None: there is none
    stride_row,
    chunks,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: the largest logit of one chunk of one row, and its index."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = tl.arange(0, CHUNK)
    inside = index < vocab - chunk * CHUNK
    x = tl.load(logits_ptr + row * stride_row + chunk * CHUNK + index, mask=inside, other=float("-inf")).to(tl.float32)
    if num_ids is not None:
        x = tl.where(index < num_ids - chunk * CHUNK, x, float("-inf"))
    # Two reductions, of values and then of indices, take a third of the instructions of one over pairs.
    value = tl.reduce(x, 0, maximum_or_nan)
    first = tl.min(tl.where(x == value, index, CHUNK), 0)
    tl.store(best_ptr + row * chunks + chunk, tl.where(value == float("inf"), float("nan"), value))
    tl.store(best_id_ptr + row * chunks + chunk, chunk * CHUNK + first)


@triton.jit
def maximum_or_nan(a, b):
    """The larger number, or NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(best, ids):
    """The largest of `best` [N] and its token id of `ids`, the smallest of equals. NaN and any number if one of `best` is NaN."""
    top = tl.reduce(best, 0, maximum_or_nan)
    return top, tl.min(tl.where(best == top, ids, 2147483647), 0)


@triton.jit
def id_of_largest(top, token_id):
    """`token_id`, or -1 if the largest logit `top` is NaN, or -inf: if every token is banned."""
    return tl.where((top != top) | (top == float("-inf")), -1, token_id)


@triton.jit(do_not_specialize=["rank", "first_id"])
def shard_pair_kernel(
    best_ptr,  # float32 [rows, chunks], results of `partial_argmax_kernel`
    best_id_ptr,  # int32 [rows, chunks]
    pairs_ptr,  # float32 [rows, RANKS, 2]: (largest logit, its token id) in this rank's place, zeros elsewhere
    rank,
    first_id,  # the token id of the first logit
    chunks,
    CHUNKS: tl.constexpr,  # chunks, rounded up to a power of two
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,  # the numbers of all pairs, 2 × RANKS, rounded up to a power of two
    USE_PDL: tl.constexpr,
):
    """One CTA: the pair of one row. The sum of the pairs of all ranks has the pair of each in its place, also if one is NaN or -inf."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    ids = tl.load(best_id_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
    top, chosen = largest_of(best, ids)
    place = tl.arange(0, PLACES)
    own = tl.where(place % 2 == 0, top, (first_id + chosen).to(tl.float32))
    tl.store(pairs_ptr + row * 2 * RANKS + place, tl.where(place // 2 == rank, own, 0.0), mask=place < 2 * RANKS)


@triton.jit
def largest_pair_kernel(
    pairs_ptr,  # float32 [rows, RANKS, 2]: (largest logit, its token id) of each rank
    out_ptr,  # int32 [rows]: token ids; -1 for a row whose largest logit is not a number
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,  # RANKS, rounded up to a power of two
    USE_PDL: tl.constexpr,
):
    """One CTA: the token id of one row."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    pair_ptr = pairs_ptr + row * 2 * RANKS + 2 * place
    top = tl.load(pair_ptr, mask=place < RANKS, other=float("-inf"))
    token_id = tl.load(pair_ptr + 1, mask=place < RANKS, other=0.0).to(tl.int32)
    top, chosen = largest_of(top, token_id)
    tl.store(out_ptr + row, id_of_largest(top, chosen))


@triton.jit
def verify_kernel(
    # Inputs
    sampled_ptr,  # int32 [L]
    token_ids_ptr,  # int32 [T]
    logits_idx_ptr,  # int32 [L]
    starts_ptr,  # int32 [S + 1]
    parents_ptr,  # int32 [L]: the node after which each draft is proposed
    masks_ptr,  # int64 [T]: the nodes that are a token itself or its ancestors
    # Outputs
    ids_ptr,  # int32 [S, COLUMNS]: the yielded ids, then -1
    accepted_ptr,  # int32 [S]
    newest_ptr,  # int32 [S]: the last yielded id
    last_ptr,  # int32 [S]: its row
    yielded_ptr,  # bool [L]: whether the token of each row is yielded
    # Constants
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # COLUMNS, rounded up to a power of two
    USE_PDL: tl.constexpr,
):
    """One CTA: the drafts of one sequence. Its nodes are its rows; node 0 has no draft and is always accepted.

    A draft matches if it equals the token sampled in the row of its parent. It is accepted if no bit of its mask is a node that does not
    match. The accepted nodes are one path, because the children of a node are different tokens.
    """
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    sequence = tl.program_id(0)
    first = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - first
    node = tl.arange(0, BLOCK)
    exists = node < count
    ids = tl.load(sampled_ptr + first + node, mask=exists, other=-1)
    token = tl.load(logits_idx_ptr + first + node, mask=exists, other=0)
    drafts = tl.load(token_ids_ptr + token, mask=exists, other=-2)
    parents = tl.load(parents_ptr + first + node, mask=exists, other=0)
    masks = tl.load(masks_ptr + token, mask=exists, other=0)
    before = tl.load(sampled_ptr + first + parents, mask=exists, other=-1)
    matches = exists & ((node == 0) | ((before == drafts) & (before >= 0)))
    bits = tl.sum(matches.to(tl.int64) << node.to(tl.int64), 0)
    accepted = matches & ((masks & ~bits) == 0)
    tl.store(yielded_ptr + first + node, accepted, mask=exists)
    depth = tl.cumsum(accepted.to(tl.int32), 0) - 1  # of accepted nodes
    last = tl.max(tl.where(accepted, node, 0), 0)
    num_accepted = tl.maximum(tl.sum(accepted.to(tl.int32), 0) - 1, 0)
    is_at = accepted[None, :] & (depth[None, :] == node[:, None])  # [depths, nodes]
    path = tl.sum(tl.where(is_at, ids[None, :] + 1, 0), 1) - 1  # -1 where no node has the depth
    tl.store(ids_ptr + sequence * COLUMNS + node, path, mask=node < COLUMNS)
    tl.store(accepted_ptr + sequence, num_accepted)
    tl.store(newest_ptr + sequence, tl.sum(tl.where(node == num_accepted, path, 0), 0))
    tl.store(last_ptr + sequence, first + last)


@triton.jit
def ordered_bits(x):
    """uint32 with the same order as float32 x: negative values have all bits inverted, others have the sign bit set."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def uniform(seed, counter):
    """A uniform random float32 in [0, 1) with 24 random bits: SplitMix64 (Steele, Lea, Flood 2014) of (seed, counter)."""
    z = seed.to(tl.uint64, bitcast=True) + (counter.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.float32) * (2.0**-24)


@triton.jit
def count_above(row_ptr, vocab, scale, threshold, BLOCK: tl.constexpr):
    """The number of values logits × scale whose `ordered_bits` are at least `threshold` (uint32)."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * scale
        count += ((ids < vocab) & (ordered_bits(x) >= threshold)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_above(row_ptr, vocab, scale, peak, threshold, BLOCK: tl.constexpr):
    """The sum of exp(x - peak) over all x = logits × scale whose `ordered_bits` are at least `threshold` (uint32)."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * scale
        mass += tl.where((ids < vocab) & (ordered_bits(x) >= threshold), tl.exp(x - peak), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def draw_kernel(
    # Logits and partial results
    logits_ptr,  # [rows, vocab]
    best_ptr,  # float32 [rows, chunks]
    best_id_ptr,  # int32 [rows, chunks]
    out_ptr,  # int32 [rows]: token ids; -1 for a row whose largest logit is not a number
    # `DrawParams`, [rows] each
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    counter_ptr,
    # Sizes and strides
    vocab,
    stride_row,
    chunks,
    CHUNKS: tl.constexpr,  # chunks, rounded up to a power of two
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,  # every temperature is 0: the draw is not compiled
    USE_PDL: tl.constexpr,
):
    """One CTA: the token id of one row."""
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    ids = tl.load(best_id_ptr + row * chunks + chunk, mask=chunk < chunks, other=0)
    top, chosen = largest_of(best, ids)
    chosen = id_of_largest(top, chosen)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & (chosen >= 0):
            row_ptr = logits_ptr + row * stride_row
            scale = 1.0 / tl.maximum(temperature, 1e-6)
            top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
            u = uniform(tl.load(seed_ptr + row), tl.load(counter_ptr + row))
            chosen = draw_token(row_ptr, vocab, top, scale, top_k, top_p, min_p, u, chosen, BLOCK)
    tl.store(out_ptr + row, chosen)


@triton.jit
def draw_token(row_ptr, vocab, top, scale, top_k, top_p, min_p, u, greedy_id, BLOCK: tl.constexpr):
    """The token of one row that the random number `u` in [0, 1) selects; `greedy_id` when rounding leaves no token above it.

    `top` is the row's largest logit, `scale` is 1 ÷ temperature.
    """
    peak = top * scale
    # Not 1e-38, which is no normal float32: Triton would make the literal, and all that it meets, float64.
    threshold = ordered_bits(peak + tl.log(tl.maximum(min_p, 1e-37)))
    if min_p <= 0:
        threshold = tl.zeros_like(threshold)
    if (top_k > 0) & (top_k < vocab):
        kth = tl.zeros_like(threshold)
        for bit in range(31, -1, -1):
            trial = kth | (tl.full((), 1, tl.uint32) << bit)
            if count_above(row_ptr, vocab, scale, trial, BLOCK) >= top_k:
                kth = trial
        nucleus = kth
    else:
        nucleus = tl.zeros_like(threshold)
    if top_p < 1.0:
        wanted = top_p * mass_above(row_ptr, vocab, scale, peak, nucleus, BLOCK)
        pth = tl.zeros_like(threshold)
        for bit in range(31, -1, -1):
            trial = pth | (tl.full((), 1, tl.uint32) << bit)
            if mass_above(row_ptr, vocab, scale, peak, trial, BLOCK) >= wanted:
                pth = trial
        nucleus = tl.maximum(nucleus, pth)
    threshold = tl.maximum(threshold, nucleus)
    target = u * mass_above(row_ptr, vocab, scale, peak, threshold, BLOCK)
    # The first token above the threshold whose cumulative mass exceeds the target.
    chosen = greedy_id
    passed = 0.0
    found = 0
    for start in range(0, vocab, BLOCK):
        if found == 0:
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * scale
            mass = tl.where((ids < vocab) & (ordered_bits(x) >= threshold), tl.exp(x - peak), 0.0)
            cumulative = passed + tl.cumsum(mass, 0)
            first = tl.min(tl.where((cumulative > target) & (mass > 0), ids, 2147483647), 0)
            if first < 2147483647:
                chosen = first
                found = 1
            passed += tl.sum(mass, 0)
    return chosen
