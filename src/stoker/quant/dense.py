"""No quantization: the weight as built."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels import ops
from stoker.layers.specs import LinearSpec
from stoker.quant.format import FORMATS, Format, Layout, LinearOp


class Dense(Format, frozen=True, tag="dense"):
    """`weight` [(experts,) out, in] in the engine's dtype."""

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        lead = len(spec.weight_shape) - 2
        return {"weight": Layout(spec.weight_shape, dtype, row_axis=lead, col_axis=lead + 1)}

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        return {"weight": weight}

    def load(self, tensors: dict[str, Tensor], bias: Tensor | None) -> LinearOp:
        return DenseLinear(tensors.pop("weight"), bias)


class DenseLinear:
    """x × weightᵀ + bias."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


FORMATS.add("dense", Dense)
