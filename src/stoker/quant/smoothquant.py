"""SmoothQuant (arXiv 2211.10438): int8 weights and int8 activations, whose outliers are moved into the weights first."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.kernels import ops
from stoker.kernels.quantized import ExpertWeights
from stoker.kernels.types import PLAIN, Fusion
from stoker.layers.specs import LinearSpec
from stoker.quant.experts import GroupedExperts, StackedExperts
from stoker.quant.format import FORMATS, ExpertsOp, Format, Layout, LinearOp
from stoker.quant.int8 import round_rows
from stoker.quant.stats import InputStats

ALPHAS = tuple(step / 20 for step in range(19))  # tried where none is given
MOST_ROWS = 512  # of the weight that the search looks at
CLIPS = tuple(1 - step / 20 for step in range(15))  # of one scale for many rows


class SmoothQuant(Format, frozen=True, kw_only=True, tag="smoothquant"):
    """`weight` int8 [(experts,) out, in], `scale` float32 [(experts,) out]; activations int8.

    Activations have each token's own scale, or without `per_token` the measured `input_scale` float32 [1]. Without `per_channel` all
    rows of a part of the weight (q, k, v; gate, up) have one scale.
    """

    alpha: float | None = None  # how much of the outliers' size goes into the weights, 0 none, 1 all; None: what is best for each linear
    per_token: bool = True
    per_channel: bool = True

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} is refused.", cure="Use a number from 0 to 1, or leave it out.")

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
        """Of the exponents tried, the one with the least squared error of the sampled inputs' outputs."""
        if self.alpha is not None:
            return _factors(weight, stats, self.alpha)
        rows = weight.flatten(0, -2)
        rows = rows[:: -(-len(rows) // MOST_ROWS)].float()
        best, chosen = torch.inf, None
        for alpha in ALPHAS:
            factors = _factors(weight, stats, alpha)
            found = self._error(rows * factors, stats.divided(factors))
            if found < best:
                best, chosen = found, factors
        return chosen

    def _error(self, rows: Tensor, stats: InputStats) -> float:
        """Of the outputs of `rows` [n, in] for the sampled inputs, both rounded."""
        sample = stats.sample
        step = sample.abs().amax(-1, keepdim=True) / 127 if self.per_token else (stats.amax.amax() / 127)
        step = step.clamp(min=1e-12)
        rounded = (sample / step).round_().clamp_(-127, 127).mul_(step)
        codes, scale = self._round(rows, (len(rows),))
        return float((rounded @ (codes.float() * scale[:, None]).t()).sub_(sample @ rows.t()).square_().sum())

    def _round(self, weight: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(int8 codes, float32 scale [..., out])."""
        if self.per_channel:
            return round_rows(weight)
        found = [_round_all(part) for part in weight.float().split(parts, dim=-2)]
        return torch.cat([codes for codes, _ in found], dim=-2), torch.cat([scale for _, scale in found], dim=-1)

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        codes, scale = self._round(weight, spec.parts)
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
            return GroupedExperts(ExpertWeights(weight, scale, "token" if step is None else "static", step), bias)
        biases = [None] * len(weight) if bias is None else bias
        experts: list[LinearOp] = [W8A8Linear(w, s, step, b) for w, s, b in zip(weight, scale, biases, strict=True)]
        return StackedExperts(experts, weight.shape[1])


def _factors(weight: Tensor, stats: InputStats, alpha: float) -> Tensor:
    inputs = stats.amax.clamp(min=1e-5)
    largest = weight.flatten(0, -2).abs().amax(dim=0).float().clamp(min=1e-5)
    return (inputs**alpha / largest ** (1 - alpha)).clamp(1e-3, 1e5)


def _round_all(part: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, float32 scale [..., out]): one scale, whose clip leaves the least squared error."""
    most = part.abs().amax().clamp(min=1e-30)
    errors = [float((_on_grid(part, most * clip / 127) - part).square().sum()) for clip in CLIPS]
    scale = most * CLIPS[errors.index(min(errors))] / 127
    return (part / scale).round_().clamp_(-127, 127).to(torch.int8), scale.expand(part.shape[:-1])


def _on_grid(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round_().clamp_(-127, 127).mul_(scale)


class W8A8Linear:
    """round(x ÷ step) × weightᵀ, × step × scale, + bias."""

    __slots__ = ("bias", "scale", "step", "weight")

    def __init__(self, weight: Tensor, scale: Tensor, step: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self.scale, self.step, self.bias = weight, scale, step, bias

    def __call__(self, x: Tensor, fusion: Fusion = PLAIN) -> Tensor:
        return ops.w8a8_linear(x, self.weight, self.scale, self.step, self.bias, fusion)


FORMATS.add("smoothquant", SmoothQuant)
