"""Mixture of experts in plain PyTorch: routing, and the two expert projections over tokens sorted by expert."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.kernels.reference.activation import gated
from stoker.kernels.reference.all_reduce import all_reduce
from stoker.kernels.reference.linear import format_reference
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


def expert_up(x: Tensor, weight: PackedWeight, routing: Routing) -> Tensor:
    """The first projection of each token by each of its experts (`ops.expert_up`)."""
    tokens = torch.div(routing.order.long(), routing.top_k, rounding_mode="floor")
    return _grouped(x.index_select(0, tokens), weight, routing)


def expert_down(
    x: Tensor,
    weight: PackedWeight,
    routing: Routing,
    residual: Tensor | None = None,
    input_gate: str | None = None,
    group: Group = SINGLE,
) -> Tensor:
    """The last projection by each expert, summed per token and over ranks (`ops.expert_down`)."""
    x = x if input_gate is None else gated(x, input_gate)
    return all_reduce(_weighted_sum(_grouped(x, weight, routing), routing), group, residual)


def _weighted_sum(y: Tensor, routing: Routing) -> Tensor:
    """[T, N]: the sum of each token's k rows of y, weighted by `routing.weights`. y [T × k, N] is sorted by expert."""
    by_choice = torch.empty_like(y).index_copy_(0, routing.order.long(), y).unflatten(0, routing.weights.shape)
    # Summed in the order of a token's choices, so that its result does not depend on other tokens.
    return (by_choice.float() * routing.weights[..., None]).sum(1).to(y.dtype)


def _grouped(x: Tensor, weight: PackedWeight, routing: Routing) -> Tensor:
    """Apply each expert's linear to its rows of x [T × k, K], which are sorted by expert. Returns [T × k, N].

    int4 weights have the layout `stored`.
    """
    out = x.new_zeros(x.shape[0], weight.out_features)
    for expert, (start, stop) in enumerate(pairwise(routing.offsets.tolist())):
        if start < stop:
            out[start:stop] = _product(x[start:stop], weight.expert(expert))
    return out


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x × weightᵀ + bias with the weight of one expert."""
    if weight.format == "dense":
        return F.linear(x, weight.values, weight.bias)
    if weight.column_order is not None:
        x = x.index_select(1, weight.column_order)
    return format_reference(weight.format).packed_linear(x, weight)


def clipped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """The gate of gpt-oss (`ops.clipped_gate`)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
