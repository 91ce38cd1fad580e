"""Mixture of experts in plain torch: routing, and the two expert projections over tokens sorted by expert."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.quantized import ExpertWeights
from stoker.kernels.reference.quant_fp8 import fp8_linear
from stoker.kernels.reference.quant_int8 import int8_linear, w8a8_linear
from stoker.kernels.routing import Routing, RoutingParams


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    weights, ids = _choose(logits.float(), correction, params)
    if params.renormalize and params.score != "softmax_topk":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return _sort(weights * params.scale, ids, logits.shape[1])


def _choose(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> tuple[Tensor, Tensor]:
    """Weights and expert ids, [T, k] each."""
    if params.score == "softmax_topk":
        best, ids = logits.topk(params.top_k, dim=-1)
        return best.softmax(dim=-1), ids
    scores = logits.sigmoid() if params.score == "sigmoid" else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction
    if params.num_groups > 1:
        wanted = wanted.masked_fill(~_allowed(wanted, params), float("-inf"))
    ids = wanted.topk(params.top_k, dim=-1).indices
    return scores.gather(1, ids), ids


def _allowed(wanted: Tensor, params: RoutingParams) -> Tensor:
    """True for the experts of each token's best groups (DeepSeek V2 section 2.1.2, V3 section 2.1.2)."""
    groups = wanted.unflatten(1, (params.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1) if params.group_score == "top2" else groups.amax(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(params.top_groups, dim=-1).indices, True)
    return chosen.repeat_interleave(groups.shape[-1], dim=1)


def _sort(weights: Tensor, ids: Tensor, num_experts: int) -> Routing:
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    return Routing(weights, order.int(), offsets.int())


def expert_up(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    tokens = torch.div(routing.order.long(), routing.top_k, rounding_mode="floor")
    return _grouped(x.index_select(0, tokens), weight, bias, routing)


def expert_down(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    return _combined(_grouped(x, weight, bias, routing), routing)


def _combined(y: Tensor, routing: Routing) -> Tensor:
    """The weighted sum of each token's choices of y [T × k, N], sorted by expert."""
    by_choice = torch.empty_like(y).index_copy_(0, routing.order.long(), y).unflatten(0, routing.weights.shape)
    # Choices are summed in their own order, so that a token's result does not depend on its neighbours.
    return (by_choice.float() * routing.weights[..., None]).sum(1).to(y.dtype)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Rows of x [T × k, K], sorted by expert, through the expert's own linear."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    bounds = routing.offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            out[start:stop] = F.linear(x[start:stop], weight[expert], None if bias is None else bias[expert])
    return out


def quant_expert_up(x: Tensor, weight: ExpertWeights, bias: Tensor | None, routing: Routing) -> Tensor:
    tokens = torch.div(routing.order.long(), routing.top_k, rounding_mode="floor")
    return _quantized(x.index_select(0, tokens), weight, bias, routing)


def quant_expert_down(x: Tensor, weight: ExpertWeights, bias: Tensor | None, routing: Routing) -> Tensor:
    return _combined(_quantized(x, weight, bias, routing), routing)


def _quantized(x: Tensor, weight: ExpertWeights, bias: Tensor | None, routing: Routing) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.weight.shape[1])
    for expert, (start, stop) in enumerate(pairwise(routing.offsets.tolist())):
        if start < stop:
            codes, scale, rows = weight.weight[expert], weight.scale[expert], x[start:stop]
            own = None if bias is None else bias[expert]
            if codes.dtype != torch.int8:
                out[start:stop] = fp8_linear(rows, codes, scale, weight.activations, weight.input_scale, own)
            elif weight.activations == "none":
                out[start:stop] = int8_linear(rows, codes, scale, own)
            else:
                out[start:stop] = w8a8_linear(rows, codes, scale, weight.input_scale, own)
    return out


def clipped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
