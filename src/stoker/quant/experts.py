"""Stacked experts: one after another on a CPU, all in one launch on a GPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from stoker.kernels import ops
from stoker.kernels.quantized import StoredExperts
from stoker.kernels.routing import Routing
from stoker.quant.format import LinearOp


class GroupedExperts:
    """Experts as a GPU's kernel reads them. Nothing of the routing is read back, so a step can be captured."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: StoredExperts, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def up(self, x: Tensor, routing: Routing) -> Tensor:
        return ops.quant_expert_up(x, self.weight, self.bias, routing)

    def down(self, x: Tensor, routing: Routing) -> Tensor:
        return ops.quant_expert_down(x, self.weight, self.bias, routing)


class StackedExperts:
    """Experts one after another: row counts are read for every call, which a CPU does for free."""

    __slots__ = ("experts", "out_features")

    def __init__(self, experts: list[LinearOp], out_features: int) -> None:
        self.experts = experts
        self.out_features = out_features

    def up(self, x: Tensor, routing: Routing) -> Tensor:
        tokens = torch.div(routing.order.long(), routing.top_k, rounding_mode="floor")
        return self._sorted(x.index_select(0, tokens), routing)

    def down(self, x: Tensor, routing: Routing) -> Tensor:
        y = self._sorted(x, routing)
        by_choice = torch.empty_like(y).index_copy_(0, routing.order.long(), y).unflatten(0, (-1, routing.top_k))
        # Choices are summed in their own order, so that a token's result does not depend on its neighbours.
        return (by_choice.float() * routing.weights[..., None]).sum(1).to(x.dtype)

    def _sorted(self, x: Tensor, routing: Routing) -> Tensor:
        """Rows of x [T × k, K], sorted by expert, through the expert's own linear."""
        out = x.new_zeros(x.shape[0], self.out_features)
        for expert, (start, stop) in enumerate(pairwise(routing.offsets.tolist())):
            if start < stop:
                out[start:stop] = self.experts[expert](x[start:stop])
        return out
