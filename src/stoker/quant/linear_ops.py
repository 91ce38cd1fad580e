"""Linears and stacked experts that are ready to run. Blocks of `layers` call them without knowledge of formats, scales or devices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.kernels import ops
from stoker.kernels.routing import Routing
from stoker.kernels.types import PLAIN, Fusion, Gate


class LinearOp(ABC):
    """A linear: x [T, in_features] → [T, out_features], in the dtype of x.

    Every linear accepts every `Fusion`: an input gate or a norm before the product, a gate and a residual after it. Linears without fused
    kernels compute these as separate ops (`ops.around`). The properties below declare what else a linear supports; their defaults are those
    of a linear without further capabilities.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        """The linear applied to x, with the operations of `fusion` before and after the product."""

    @property
    def packed_weight(self) -> PackedWeight | None:
        """The weight, if the linear consists only of the product with it, so that `ops.fused_layer` may compute it; otherwise None."""
        return None

    @property
    def min_input_gate_rows(self) -> float:
        """The number of rows from which gating the input (`Fusion.input_gate`) is faster than gating the preceding linear's output."""
        return math.inf

    def gates_output(self, x: Tensor) -> bool:
        """Whether gating this linear's output for x is faster than gating the next linear's input, although that has enough rows."""
        return False

    @property
    def is_embedding(self) -> bool:
        """Whether `embed` is supported, as the token embedding and a head that is tied to it require."""
        return False

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight for int32 `token_ids` [T]: [T, in_features] in `dtype`."""
        raise TypeError(f"{type(self).__name__} is no embedding table")


class ExpertsOp(ABC):
    """Stacked experts: the linears of a spec with num_experts > 0."""

    __slots__ = ()

    @property
    def quantizes_input(self) -> bool:
        """Whether `down` quantizes its input, row by row, and applies an input gate at the same time."""
        return False

    @abstractmethod
    def up(self, x: Tensor, routing: Routing, gate: Gate | None = None) -> Tensor:
        """The first projection of each token by its experts: x [T, in_features] → [T × k, out_features], ordered by routing.order.

        With `gate`, the experts have gates, then ups, and the result is [T × k, out_features / 2] (`ops.gated`).
        """

    @abstractmethod
    def down(
        self, x: Tensor, routing: Routing, residual: Tensor | None = None, input_gate: str | None = None, group: Group = SINGLE
    ) -> Tensor:
        """The last projection: x [T × k, in_features], ordered by routing.order → [T, out_features].

        With `input_gate`, an activation, x [T × k, 2 × in_features] has gates, then the values that act(gate) multiplies. The results of a
        token's experts are summed with the weights of `routing`, then over the ranks of `group`. `residual` [T, out_features] is added.
        """


class PackedLinear(LinearOp):
    """The linear of a packed weight and its bias."""

    __slots__ = ("_min_input_gate_rows", "weight")

    def __init__(self, weight: PackedWeight, min_input_gate_rows: float = math.inf) -> None:
        self.weight, self._min_input_gate_rows = weight, min_input_gate_rows

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        return ops.packed_linear(x, self.weight, fusion)

    @property
    def packed_weight(self) -> PackedWeight:
        return self.weight

    @property
    def min_input_gate_rows(self) -> float:
        return self._min_input_gate_rows

    def gates_output(self, x: Tensor) -> bool:
        return ops.gates_output(x, self.weight)

    @property
    def is_embedding(self) -> bool:
        return self.weight.format in ("dense", "int8") and self.weight.activations == "none"

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.packed_embedding(token_ids, self.weight, dtype)


class PackedExperts(ExpertsOp):
    """Experts in one op. On a GPU nothing of the routing is read back, so that a step can be captured."""

    __slots__ = ("weight",)

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight

    @property
    def quantizes_input(self) -> bool:
        return self.weight.activations in ("token", "static")

    def up(self, x: Tensor, routing: Routing, gate: Gate | None = None) -> Tensor:
        """The first projection of each token's experts, by `ops.expert_up`."""
        return ops.expert_up(x, self.weight, routing, gate)

    def down(
        self, x: Tensor, routing: Routing, residual: Tensor | None = None, input_gate: str | None = None, group: Group = SINGLE
    ) -> Tensor:
        """The last projection of each token's experts, by `ops.expert_down`."""
        return ops.expert_down(x, self.weight, routing, residual, input_gate, group)


class SequentialExperts(ExpertsOp):
    """Experts one after another, for quantized weights on a CPU, where reading row counts in every call costs nothing."""

    __slots__ = ("experts", "out_features")

    def __init__(self, experts: list[PackedLinear]) -> None:
        self.experts = experts
        self.out_features = experts[0].weight.out_features

    def up(self, x: Tensor, routing: Routing, gate: Gate | None = None) -> Tensor:
        """Sort the tokens by expert, and apply each expert to its tokens."""
        y = self._apply_sorted(x.index_select(0, routing.tokens), routing)
        return y if gate is None else ops.gated(y, gate)

    def down(
        self, x: Tensor, routing: Routing, residual: Tensor | None = None, input_gate: str | None = None, group: Group = SINGLE
    ) -> Tensor:
        """Apply each expert to its rows. Add the results of each token with the routing weights, then those of ranks, and the residual."""
        y = self._apply_sorted(x if input_gate is None else ops.gated(x, input_gate), routing)
        by_choice = torch.empty_like(y).index_copy_(0, routing.order.long(), y).unflatten(0, (-1, routing.top_k))
        # Choices are summed in their own order, so that a token's result does not depend on its neighbours.
        total = (by_choice.float() * routing.weights[..., None]).sum(1).to(x.dtype)
        return ops.all_reduce(total, group, residual)

    def _apply_sorted(self, x: Tensor, routing: Routing) -> Tensor:
        """Apply each expert's linear to its rows of x [T × k, K], which are sorted by expert."""
        out = x.new_zeros(x.shape[0], self.out_features)
        for expert, (start, stop) in enumerate(pairwise(routing.offsets.tolist())):
            if start < stop:
                out[start:stop] = self.experts[expert](x[start:stop])
        return out
