"""No quantization: the weight as built."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.kernels.quantized import RowWeight
from stoker.kernels.routing import Routing
from stoker.kernels.types import PLAIN, Fusion
from stoker.quant.format import FORMATS, ExpertsOp, Format, Layout, LinearOp


class Dense(Format, frozen=True, tag="dense"):
    """`weight` [(experts,) out, in] in the engine's dtype."""

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        lead = len(spec.weight_shape) - 2
        return {"weight": Layout(spec.weight_shape, dtype, row_axis=lead, col_axis=lead + 1)}

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        return {"weight": weight}

    def load(self, tensors: dict[str, Tensor], bias: Tensor | None) -> LinearOp | ExpertsOp:
        weight = tensors.pop("weight")
        return DenseLinear(weight, bias) if weight.dim() == 2 else DenseExperts(weight, bias)


class DenseLinear:
    """x × weightᵀ + bias."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        return ops.linear(x, self.weight, self.bias, fusion)

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.embedding(token_ids, self.weight)

    def row_weight(self) -> RowWeight:
        return RowWeight(str(self.weight.dtype).removeprefix("torch."), self.weight, None, self.bias)


class DenseExperts:
    """Stacked experts: weight [num_experts, out, in]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def up(self, x: Tensor, routing: Routing) -> Tensor:
        return ops.expert_up(x, self.weight, self.bias, routing)

    def down(self, x: Tensor, routing: Routing) -> Tensor:
        return ops.expert_down(x, self.weight, self.bias, routing)


FORMATS.add("dense", Dense)
