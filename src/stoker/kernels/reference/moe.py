"""Mixture of experts in plain PyTorch: routing, and the two expert projections over tokens sorted by expert."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.quantized import BlockExperts, Int4Experts, Int4Weight, Int8Experts, StoredExperts
from stoker.kernels.reference.quant_fp8 import block_fp8_linear, fp8_linear
from stoker.kernels.reference.quant_int4 import int4_linear
from stoker.kernels.reference.quant_int8 import int8_linear, w8a8_linear
from stoker.kernels.routing import Routing, RoutingParams


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """See `ops.route`."""
    weights, ids = _choose(logits.float(), correction, params)
    if params.renormalize and params.score != "softmax_topk":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return _sort(weights * params.scale, ids, logits.shape[1])


def _choose(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> tuple[Tensor, Tensor]:
    """The weights and ids [T, k] of each token's experts."""
    if params.score == "softmax_topk":
        best, ids = logits.topk(params.top_k, dim=-1)
        return best.softmax(dim=-1), ids
    scores = logits.sigmoid() if params.score == "sigmoid" else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction
    if params.num_groups > 1:
        wanted = wanted.masked_fill(~_in_best_groups(wanted, params), float("-inf"))
    ids = wanted.topk(params.top_k, dim=-1).indices
    return scores.gather(1, ids), ids


def _in_best_groups(wanted: Tensor, params: RoutingParams) -> Tensor:
    """bool [T, num_experts]: the experts of each token's best groups (DeepSeek-V2 and DeepSeek-V3, section 2.1.2)."""
    groups = wanted.unflatten(1, (params.num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1) if params.group_score == "top2" else groups.amax(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(params.top_groups, dim=-1).indices, True)
    return chosen.repeat_interleave(groups.shape[-1], dim=1)


def _sort(weights: Tensor, ids: Tensor, num_experts: int) -> Routing:
    """The choices `ids` [T, k], sorted by expert and then by token."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    return Routing(weights, order.int(), offsets.int())


def expert_up(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """See `ops.expert_up`."""
    tokens = torch.div(routing.order.long(), routing.top_k, rounding_mode="floor")
    return _grouped(x.index_select(0, tokens), weight, bias, routing)


def expert_down(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """See `ops.expert_down`."""
    return _weighted_sum(_grouped(x, weight, bias, routing), routing)


def _weighted_sum(y: Tensor, routing: Routing) -> Tensor:
    """[T, N]: the weighted sum of each token's choices in y [T × k, N], which is sorted by expert."""
    by_choice = torch.empty_like(y).index_copy_(0, routing.order.long(), y).unflatten(0, routing.weights.shape)
    # Summed in the order of a token's choices, so that its result does not depend on other tokens.
    return (by_choice.float() * routing.weights[..., None]).sum(1).to(y.dtype)


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Rows of x [T × k, K], sorted by expert, each through its expert's linear."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    bounds = routing.offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            out[start:stop] = F.linear(x[start:stop], weight[expert], None if bias is None else bias[expert])
    return out


def quant_expert_up(x: Tensor, weight: StoredExperts, bias: Tensor | None, routing: Routing) -> Tensor:
    """See `ops.quant_expert_up`."""
    tokens = torch.div(routing.order.long(), routing.top_k, rounding_mode="floor")
    return _grouped_quantized(x.index_select(0, tokens), weight, bias, routing)


def quant_expert_down(x: Tensor, weight: StoredExperts, bias: Tensor | None, routing: Routing) -> Tensor:
    """See `ops.quant_expert_down`."""
    return _weighted_sum(_grouped_quantized(x, weight, bias, routing), routing)


def _grouped_quantized(x: Tensor, weight: StoredExperts, bias: Tensor | None, routing: Routing) -> Tensor:
    """`_grouped` with quantized weights."""
    codes = weight.weight.codes if isinstance(weight, Int4Experts) else weight.weight
    out = x.new_zeros(x.shape[0], codes.shape[1])
    for expert, (start, stop) in enumerate(pairwise(routing.offsets.tolist())):
        if start < stop:
            out[start:stop] = _product(x[start:stop], weight, expert, None if bias is None else bias[expert])
    return out


def _product(x: Tensor, weight: StoredExperts, expert: int, bias: Tensor | None) -> Tensor:
    """Rows x of one expert through its linear. int4 is read as stored, not as packed for a device."""
    if isinstance(weight, Int4Experts):
        stacked = weight.weight
        zero, offset = (None if t is None else t[expert] for t in (stacked.zero, stacked.offset))
        own = Int4Weight(stacked.codes[expert], stacked.scale[expert], zero, offset, stacked.group_size)
        return int4_linear(x if weight.order is None else x.index_select(1, weight.order[expert]), own, bias)
    codes, scale = weight.weight[expert], weight.scale[expert]
    if isinstance(weight, BlockExperts):
        return block_fp8_linear(x, codes, scale, weight.block, bias)
    if isinstance(weight, Int8Experts):
        wide = codes * _per_column(scale, weight.group_size, codes.shape[1])
        if weight.offset is not None:
            wide += _per_column(weight.offset[expert], weight.group_size, codes.shape[1])
        return F.linear(x, wide.to(x.dtype), bias)
    if codes.dtype != torch.int8:
        return fp8_linear(x, codes, scale, weight.activations, weight.input_scale, bias)
    if weight.activations == "none":
        return int8_linear(x, codes, scale, bias)
    return w8a8_linear(x, codes, scale, weight.input_scale, bias)


def _per_column(grid: Tensor, group_size: int, columns: int) -> Tensor:
    """float32 [..., columns]: the value of each column's group in `grid` [..., groups]."""
    return grid.float().repeat_interleave(group_size, -1)[..., :columns]


def clipped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """See `ops.clipped_gate`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
