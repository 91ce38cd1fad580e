"""SmoothQuant (arXiv 2211.10438): int8 weights and int8 activations, whose outliers are moved into the weights first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.kernels import ops
from stoker.kernels.quantized import ExpertWeights
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.specs import LinearSpec
from stoker.quant.experts import ByteExperts, StackedExperts
from stoker.quant.format import FORMATS, ExpertsOp, Format, Layout, LinearOp
from stoker.quant.int8 import round_rows
from stoker.quant.stats import InputStats


class SmoothQuant(Format, frozen=True, kw_only=True, tag="smoothquant"):
    """`weight` int8 [(experts,) out, in], `scale` float32 [(experts,) out]; activations int8.

    Activations have each token's own scale, or without `per_token` the measured `input_scale` float32 [1]. Without `per_channel` all
    rows of a weight have one scale.
    """

    alpha: float = 0.8  # how much of the outliers' size goes into the weights: 0 none, 1 all
    per_token: bool = True
    per_channel: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} is refused.", cure="Use a number from 0 to 1.")

    @property
    def needs_calibration(self) -> bool:
        return True

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        lead = len(spec.weight_shape) - 2
        stored = {
            "weight": Layout(spec.weight_shape, torch.int8, row_axis=lead, col_axis=lead + 1),
            "scale": Layout(spec.weight_shape[:-1], torch.float32, row_axis=lead),
        }
        return stored if self.per_token else stored | {"input_scale": Layout((1,), torch.float32)}

    def smooth(self, weight: Tensor, spec: LinearSpec, stats: InputStats) -> Tensor | None:
        inputs = stats.amax.clamp(min=1e-5)
        largest = weight.flatten(0, -2).abs().amax(dim=0).float().clamp(min=1e-5)
        return (inputs**self.alpha / largest ** (1 - self.alpha)).clamp(1e-3, 1e5)

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: Any = None) -> dict[str, Tensor]:
        if self.per_channel:
            codes, scale = round_rows(weight)
        else:
            codes, one = round_rows(weight.reshape(1, -1))
            codes, scale = codes.view(weight.shape), one.expand(weight.shape[:-1].numel()).reshape(weight.shape[:-1])
        stored = {"weight": codes, "scale": scale.contiguous()}
        if self.per_token:
            return stored
        if stats is None:
            raise ConfigError(f"{spec.name}: activations with one scale need a measured one.", cure="Calibrate, or set per_token.")
        return stored | {"input_scale": (stats.amax.amax() / 127).clamp(min=1e-12).reshape(1)}

    def load(self, tensors: dict[str, Tensor], bias: Tensor | None) -> LinearOp | ExpertsOp:
        weight, scale, step = tensors["weight"], tensors["scale"], tensors.get("input_scale")
        if weight.dim() == 2:
            return W8A8Linear(weight, scale, step, bias)
        if not weight.is_cpu:
            return ByteExperts(ExpertWeights(weight, scale, "token" if step is None else "static", step), bias)
        biases = [None] * len(weight) if bias is None else bias
        experts: list[LinearOp] = [W8A8Linear(w, s, step, b) for w, s, b in zip(weight, scale, biases, strict=True)]
        return StackedExperts(experts, weight.shape[1])


class W8A8Linear:
    """round(x ÷ step) × weightᵀ, × step × scale, + bias."""

    __slots__ = ("bias", "scale", "step", "weight")

    def __init__(self, weight: Tensor, scale: Tensor, step: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self.scale, self.step, self.bias = weight, scale, step, bias

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        return ops.w8a8_linear(x, self.weight, self.scale, self.step, self.bias, fusion)


FORMATS.add("smoothquant", SmoothQuant)
