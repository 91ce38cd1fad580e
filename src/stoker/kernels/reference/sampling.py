"""Sampling in plain PyTorch: a probability threshold instead of a sorted copy, and one uniform number per row."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.types import DrawParams

_MAX_TOP = 256  # top-p usually needs no more tokens; a full sort of 49,152 takes 4 ms per row


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """Greedy or random token ids (`ops.sample`)."""
    best = logits.max(dim=-1)
    greedy = torch.where(best.values.isfinite(), best.indices, -1).to(torch.int32)
    if params.all_greedy:
        return greedy
    temperature = params.temperature.clamp(min=1e-6).unsqueeze(1)
    scaled = logits.float() / temperature
    probs = torch.softmax(scaled, dim=-1)
    remaining = probs * (probs >= threshold(probs, params).unsqueeze(1))
    cumulative = remaining.double().cumsum(dim=-1)
    target = uniform(params.seeds, params.counters).double() * cumulative[:, -1]
    # The first token whose cumulative weight exceeds the target. Its own weight is positive, so it passed the threshold.
    drawn = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1).clamp(max=logits.shape[1] - 1).to(torch.int32)
    return torch.where((params.temperature > 0) & (greedy >= 0), drawn, greedy)


def largest_of_shard(logits: Tensor, num_ids: int, rank: int, num_ranks: int) -> Tensor:
    """The largest logits of a rank's shard and their token ids (`ops.sample_shards`): float32 [L, num_ranks, 2], zeros for other ranks."""
    size = logits.shape[1]
    best = logits.float().masked_fill(torch.arange(size, device=logits.device) >= num_ids, float("-inf")).max(dim=-1)
    pairs = best.values.new_zeros(len(logits), num_ranks, 2)
    pairs[:, rank, 0] = best.values.masked_fill(best.values == float("inf"), float("nan"))
    pairs[:, rank, 1] = best.indices + rank * size
    return pairs


def largest_over_ranks(pairs: Tensor) -> Tensor:
    """The token ids of the largest logits of all ranks (`ops.sample_shards`)."""
    best = pairs[:, :, 0].max(dim=-1)
    ids = pairs[:, :, 1].gather(1, best.indices.unsqueeze(1)).squeeze(1)
    return torch.where(best.values.isfinite(), ids, -1).to(torch.int32)


def threshold(probs: Tensor, params: DrawParams) -> Tensor:
    """[L]: the smallest probability of each row that is not removed by top-k, then top-p of the rest, and min-p.

    `probs` [L, V]. Several tokens with exactly this probability all remain.
    """
    vocab = probs.shape[1]
    limit = probs.amax(dim=-1) * params.min_p
    k = torch.where(params.top_k > 0, params.top_k.clamp(max=vocab), vocab)
    cut = (k < vocab) | (params.top_p < 1.0)
    if bool(cut.any()):
        rows = cut.nonzero().squeeze(1)
        limit[rows] = torch.maximum(limit[rows], _nucleus(probs[rows], k[rows], params.top_p[rows]))
    return limit


def _nucleus(probs: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """[L]: the smallest probability of each row's top-p nucleus within its `k` [L] most probable tokens. `p` [L] is top_p."""
    width = min(_MAX_TOP, probs.shape[1])
    best = torch.topk(probs, width, dim=-1).values
    # The `width` best suffice if they contain the k best, or if k is the whole vocabulary and they already have mass p.
    enough = (k <= width) | ((k == probs.shape[1]) & (p < 1.0) & (best.sum(dim=-1) >= p))
    if not bool(enough.all()):
        best = torch.sort(probs, dim=-1, descending=True).values
    inside_k = torch.arange(best.shape[1], device=probs.device) < k[:, None]
    best = best * inside_k
    mass = best.double().cumsum(dim=-1)
    total = torch.where(k < probs.shape[1], mass[:, -1], probs.double().sum(dim=-1))
    wanted = (p.double() * total)[:, None]
    # A token is in the nucleus when the more probable ones have less than p.
    inside = inside_k & ((mass - best.double() < wanted) | (p >= 1.0)[:, None])
    inside[:, 0] = True  # even if p is too small for float32
    return best.masked_fill(~inside, float("inf")).amin(dim=-1)


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Uniform random float32 in [0, 1), a function of the int64 seeds and int32 counters only.

    It has 24 bits of SplitMix64 (Steele et al., OOPSLA 2014) applied to the combination of both.
    """
    z = seeds + (counters.long() + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    z = z ^ _shift(z, 31)
    return _shift(z, 40).float() * 2.0**-24


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def verify(
    sampled: Tensor, token_ids: Tensor, logits_idx: Tensor, starts: Tensor, parents: Tensor, masks: Tensor, max_drafts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept drafts that equal the sampled tokens (`ops.verify`)."""
    num_rows, width = len(sampled), max_drafts + 1
    nodes = torch.arange(width, device=sampled.device)
    first = starts[:-1].long().unsqueeze(1)
    exists = first + nodes < starts[1:].unsqueeze(1)  # [S, nodes]
    row = (first + nodes).clamp(max=num_rows - 1)
    token = logits_idx.long()[row]
    before = sampled[(first + parents.long()[row]).clamp(max=num_rows - 1)]
    matches = exists & ((nodes == 0) | ((before == token_ids[token]) & (before >= 0)))
    bits = (matches.long() << nodes).sum(1, keepdim=True)
    accepted = matches & (masks[token] & ~bits == 0)  # the node and all its ancestors match
    depth = torch.where(accepted, accepted.cumsum(1) - 1, width)
    ids = sampled.new_full((len(first), width + 1), -1).scatter_(1, depth, sampled[row])[:, :width].contiguous()
    num_accepted = (accepted.sum(1, dtype=torch.int32) - 1).clamp(min=0)
    newest = ids.gather(1, num_accepted.long().unsqueeze(1)).squeeze(1)
    last = starts[:-1] + (accepted * nodes).amax(1).to(torch.int32)
    is_yielded = torch.zeros(num_rows + 1, dtype=torch.bool, device=sampled.device)
    is_yielded.scatter_(0, torch.where(exists, row, num_rows).flatten(), accepted.flatten())
    return ids, num_accepted, newest, last, is_yielded[:num_rows]


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of the tokens `token_ids` and of the most probable tokens (`ops.logprobs`)."""
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1)
    chosen = wide.gather(1, token_ids.long().unsqueeze(1)).squeeze(1) - total
    if not num_top:
        empty = wide.new_empty(wide.shape[0], 0)
        return chosen, empty, empty.to(torch.int32)
    best, ids = torch.topk(wide, num_top, dim=-1)
    return chosen, best - total[:, None], ids.to(torch.int32)
