"""Experts in plain PyTorch: the two projections over tokens sorted by expert."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.kernels.reference.activation import gated
from stoker.kernels.reference.all_reduce import all_reduce
from stoker.kernels.reference.linear import format_reference
from stoker.kernels.routing import Routing
from stoker.kernels.types import Gate


def expert_up(x: Tensor, weight: PackedWeight, routing: Routing, gate: Gate | None = None) -> Tensor:
    """The first projection of each token by each of its experts (`ops.expert_up`)."""
    y = _grouped(x.index_select(0, routing.tokens), weight, routing)
    return y if gate is None else gated(y, gate)


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
        if start == stop:
            continue
        if weight.format != "dense":
            out[start:stop] = _product(x[start:stop], weight.expert(expert))
            continue
        torch.mm(x[start:stop], weight.values[expert].t(), out=out[start:stop])  # so that the memory does not depend on the routing
        if weight.bias is not None:
            out[start:stop] += weight.bias[expert]
    return out


def _product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x × weightᵀ + bias with the quantized weight of one expert."""
    if weight.column_order is not None:
        x = x.index_select(1, weight.column_order)
    return format_reference(weight.format).packed_linear(x, weight)
