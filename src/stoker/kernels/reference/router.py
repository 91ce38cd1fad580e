"""The choice of experts in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.routing import Routing, RoutingParams


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """Choose the experts of each token (`ops.route`)."""
    weights, ids = _choose(logits.float(), correction, params)
    if params.renormalize and params.score != "softmax_topk":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return _sort(weights * params.scale, ids, logits.shape[1])


def _choose(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> tuple[Tensor, Tensor]:
    """The weights and ids, both [T, k], of each token's k experts, before renormalization."""
    if params.score == "softmax_topk":
        best, ids = logits.topk(params.top_k, dim=-1)
        return best.softmax(dim=-1), ids
    if params.score == "sparsemixer":
        return _sparse_mixer(logits, params)
    scores = logits.sigmoid() if params.score == "sigmoid" else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction
    if params.num_groups > 1:
        wanted = wanted.masked_fill(~_in_best_groups(wanted, params), float("-inf"))
    ids = wanted.topk(params.top_k, dim=-1).indices
    return scores.gather(1, ids), ids


def _sparse_mixer(logits: Tensor, params: RoutingParams) -> tuple[Tensor, Tensor]:
    """The weights and ids, both [T, k], of SparseMixer without sampling: experts are chosen one after the other by their logits."""
    available, weights, ids = logits, [], []
    for _ in range(params.top_k):
        best, expert = available.max(dim=-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * params.jitter
        weights.append(available.masked_fill(is_far, float("-inf")).softmax(dim=-1).gather(1, expert))
        ids.append(expert)
        available = available.scatter(1, expert, float("-inf"))
    return torch.cat(weights, dim=1), torch.cat(ids, dim=1)


def _in_best_groups(wanted: Tensor, params: RoutingParams) -> Tensor:
    """bool [T, num_experts]: True for the experts of each token's best groups (DeepSeek-V2 and DeepSeek-V3, section 2.1.2).

    `wanted` [T, num_experts] are the scores by which experts are ranked.
    """
    groups = wanted.unflatten(1, (params.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1) if params.group_score == "top2" else groups.amax(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(params.top_groups, dim=-1).indices, True)
    return chosen.repeat_interleave(groups.shape[-1], dim=1)


def _sort(weights: Tensor, ids: Tensor, num_experts: int) -> Routing:
    """The Routing of the chosen experts `ids` [T, k], sorted by expert and then by token."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    return Routing(weights, order.int(), offsets.int())
