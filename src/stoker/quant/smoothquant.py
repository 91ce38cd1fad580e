"""SmoothQuant (arXiv 2211.10438): int8 weights and int8 activations, whose outliers are moved into the weights first."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.compensate import Compensation, compensated
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.int8 import INT8_UNIT
from stoker.quant.stats import InputStats

DAMP = 0.01  # of compensation
TOGETHER = 16  # columns that are rounded at once
STATIC_ALPHA = 0.8
ALPHAS = tuple(step / 20 for step in range(21))  # tried where none is given
MOST_ROWS = 512  # of the weight that the search looks at
OUTLIER = 2.0  # times the median row of a part: larger rows keep their own scale where the others share one


class SmoothQuant(Format, frozen=True, kw_only=True, tag="smoothquant"):
    """`weight` int8 [(experts,) out, in], `scale` float32 [(experts,) out]; activations int8.

    Activations have each token's own scale, or without `per_token` the measured `input_scale` float32 [1]. Without `per_channel` the
    rows of a part of the weight (q, k, v; gate, up) share one, but for outliers: one row fifty times the others would round them all to 0.
    """

    alpha: float | None = None  # how much of the outliers' size goes into the weights, 0 none, 1 all; None: see `smooth`
    per_token: bool = True
    per_channel: bool = True
    compensate: bool = True  # each columns' rounding errors are made up for by later ones, as GPTQ does

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
        """Without `alpha`, of the exponents tried the one with the least squared error of the outputs that is to be expected.

        One scale for all tokens takes STATIC_ALPHA: what calibration likes best, 0.9 and more, leaves no room for inputs larger than
        those it saw. On SmolLM2 perplexity grows by 11.7 % so, and by 5.6 % with 0.8.
        """
        if self.alpha is not None or not self.per_token:
            return _factors(weight, stats, STATIC_ALPHA if self.alpha is None else self.alpha)
        rows = weight.flatten(0, -2).float()
        parts = rows.split(spec.parts if sum(spec.parts) == len(rows) else (len(rows),))
        lasting = Compensation(stats, DAMP, act_order=True).lasting() if self.compensate else stats.mean_square
        tried = [_factors(weight, stats, alpha) for alpha in ALPHAS]
        errors = [_input_error(rows, factors, stats) + self._weight_error(parts, factors, lasting) for factors in tried]
        return tried[errors.index(min(errors))]

    def _weight_error(self, parts: tuple[Tensor, ...], factors: Tensor, lasting: Tensor) -> float:
        """Squared, of a token's outputs: each weight × factor is off by up to half a step, evenly, and `lasting` [in] of that stays."""
        squares = sum(float(self._largest(part * factors).square().sum()) for part in parts)
        return squares / 127**2 / 12 * float((lasting / factors.square()).sum())

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        scale = self._scale(weight.float(), spec)
        wide = compensated(weight, scale, stats, DAMP, TOGETHER, _codes) if stats is not None and self.compensate else weight.float()
        stored = {"weight": _codes(wide / scale), "scale": scale.squeeze(-1).contiguous()}
        if self.per_token:
            return stored
        if stats is None:
            raise ConfigError(f"{spec.name}: activations with one scale need a measured one.", cure="Calibrate, or set per_token.")
        return stored | {"input_scale": (stats.amax.amax() * INT8_UNIT).clamp(min=1e-12).reshape(1)}

    def _scale(self, weight: Tensor, spec: LinearSpec) -> Tensor:
        """float32 [..., out, 1]."""
        return torch.cat([self._largest(part) for part in weight.split(spec.parts, dim=-2)], dim=-1)[..., None] * INT8_UNIT

    def _largest(self, part: Tensor) -> Tensor:
        """The magnitude [..., out] that code 127 stands for in each row of a part of the weight."""
        largest = part.abs().amax(-1).clamp(min=1e-30)
        return largest if self.per_channel else _shared(largest)

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        values, scale, input_scale = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("input_scale", None)
        activations = "token" if input_scale is None else "static"
        return PackedWeight("int8", values, scale, bias=bias, activations=activations, input_scale=input_scale)


def _factors(weight: Tensor, stats: InputStats, alpha: float) -> Tensor:
    inputs = stats.amax.clamp(min=1e-5)
    largest = weight.flatten(0, -2).abs().amax(dim=0).float().clamp(min=1e-5)
    return (inputs**alpha / largest ** (1 - alpha)).clamp(1e-3, 1e5)


def _input_error(rows: Tensor, factors: Tensor, stats: InputStats) -> float:
    """Squared, of a token's outputs, by rounding its inputs ÷ factors: measured on the sampled inputs and some of the rows."""
    every, sample = -(-len(rows) // MOST_ROWS), stats.sample / factors
    step = sample.abs().amax(-1, keepdim=True).div(127).clamp(min=1e-12)
    wrong = (sample / step).round_().mul_(step).sub_(sample)
    return float((wrong @ (rows[::every] * factors).t()).square().sum()) / max(len(sample), 1) * every


def _codes(units: Tensor) -> Tensor:
    return units.round().clamp_(-127, 127).to(torch.int8)


def _shared(largest: Tensor) -> Tensor:
    """What rows of one part [..., out] with these largest magnitudes are scaled to: all to the same, but for the outliers."""
    outlier = largest > OUTLIER * largest.median()
    return torch.where(outlier, largest, largest[~outlier].amax())


FORMATS.add("smoothquant", SmoothQuant)
