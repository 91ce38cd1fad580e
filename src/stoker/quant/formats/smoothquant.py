"""SmoothQuant (arXiv 2211.10438): int8 weights and int8 activations, after scale folding has moved outliers into the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.calibration.error_compensation import ErrorCompensation, compensate_errors
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.formats.int8 import INT8_UNIT

DAMPING = 0.01  # of error compensation
COLUMNS_PER_STEP = 16  # rounded together by error compensation
STATIC_ALPHA = 0.8
ALPHAS = tuple(step / 20 for step in range(21))  # candidates
MAX_SEARCH_ROWS = 512  # of the weight
OUTLIER = 2.0  # times the median row of a part: larger rows have their own scale where the others share one


class SmoothQuant(Format, frozen=True, kw_only=True, tag="smoothquant"):
    """`weight` int8 [(experts,) out, in], `scale` float32 [(experts,) out]; activations int8.

    Activations have a scale per token, or without `per_token` the measured `input_scale` float32 [1]. Without `per_channel` the rows of a
    part of the weight (q, k, v; gate, up) share a scale, except for outliers: a row fifty times larger would round all others to 0.
    """

    alpha: float | None = (
        None  # the exponent of scale folding: 0 leaves outliers in the inputs, 1 moves them into the weights; None: searched
    )
    per_token: bool = True
    per_channel: bool = True
    compensate: bool = True  # error compensation, as in GPTQ

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} is not from 0 to 1.", cure="Use a number from 0 to 1, or leave it out.")

    @property
    def needs_calibration(self) -> bool:
        """Whether `quantize` needs measured inputs."""
        return True

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires."""
        axis = len(spec.weight_shape) - 2
        stored = {
            "weight": Layout(spec.weight_shape, torch.int8, row_axis=axis, col_axis=axis + 1),
            "scale": Layout(spec.weight_shape[:-1], torch.float32, row_axis=axis),
        }
        return stored if self.per_token else stored | {"input_scale": Layout((1,), torch.float32)}

    def folding_factors(self, weight: Tensor, spec: LinearSpec, stats: InputStats) -> Tensor | None:
        """Factors [in] for scale folding with `alpha` or, without it, the candidate with the least expected squared error of the outputs.

        With a static input scale, alpha is STATIC_ALPHA: the candidate that is best on calibration data, 0.9 or more, leaves no room for
        larger inputs than those measured. SmolLM2's perplexity then grows by 11.7 %, and by 5.6 % with 0.8.
        """
        if self.alpha is not None or not self.per_token:
            return _factors(weight, stats, STATIC_ALPHA if self.alpha is None else self.alpha)
        rows = weight.flatten(0, -2).float()
        parts = rows.split(spec.parts if sum(spec.parts) == len(rows) else (len(rows),))
        remaining = ErrorCompensation(stats, DAMPING, act_order=True).remaining_error() if self.compensate else stats.mean_square
        candidates = [_factors(weight, stats, alpha) for alpha in ALPHAS]
        errors = [_input_error(rows, factors, stats) + self._weight_error(parts, factors, remaining) for factors in candidates]
        return candidates[errors.index(min(errors))]

    def _weight_error(self, parts: tuple[Tensor, ...], factors: Tensor, remaining: Tensor) -> float:
        """The expected squared error of a token's outputs that results from rounding the weight × factors.

        Rounding errors are uniform within half a step, and the fraction `remaining` [in] of each column's squared error remains.
        """
        squares = sum(float(self._largest(part * factors).square().sum()) for part in parts)
        return squares / 127**2 / 12 * float((remaining / factors.square()).sum())

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires. Raises ConfigError without `stats` if it needs them."""
        scale = self._scale(weight.float(), spec)
        if stats is not None and self.compensate:
            wide = compensate_errors(weight, scale, stats, DAMPING, COLUMNS_PER_STEP, _to_int8)
        else:
            wide = weight.float()
        stored = {"weight": _to_int8(wide / scale), "scale": scale.squeeze(-1).contiguous()}
        if self.per_token:
            return stored
        if stats is None:
            raise ConfigError(f"{spec.name}: a static input scale needs measured inputs.", cure="Calibrate, or set per_token.")
        return stored | {"input_scale": (stats.amax.amax() * INT8_UNIT).clamp(min=1e-12).reshape(1)}

    def _scale(self, weight: Tensor, spec: LinearSpec) -> Tensor:
        """The scales of the weight's rows, float32 [..., out, 1]."""
        return torch.cat([self._largest(part) for part in weight.split(spec.parts, dim=-2)], dim=-1)[..., None] * INT8_UNIT

    def _largest(self, part: Tensor) -> Tensor:
        """[..., out]: the magnitude that the quantized value 127 represents in each row of one part of the weight."""
        largest = part.abs().amax(-1).clamp(min=1e-30)
        return largest if self.per_channel else _shared_magnitudes(largest)

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        values, scale, input_scale = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("input_scale", None)
        activations = "token" if input_scale is None else "static"
        return PackedWeight("int8", values, scale, bias=bias, activations=activations, input_scale=input_scale)


def _factors(weight: Tensor, stats: InputStats, alpha: float) -> Tensor:
    """SmoothQuant's factors [in]: input magnitude ** alpha ÷ weight magnitude ** (1 - alpha)."""
    inputs = stats.amax.clamp(min=1e-5)
    largest = weight.flatten(0, -2).abs().amax(dim=0).float().clamp(min=1e-5)
    return (inputs**alpha / largest ** (1 - alpha)).clamp(1e-3, 1e5)


def _input_error(rows: Tensor, factors: Tensor, stats: InputStats) -> float:
    """The squared error of a token's outputs that results from rounding its inputs ÷ factors, measured on sampled inputs and rows."""
    stride, sample = -(-len(rows) // MAX_SEARCH_ROWS), stats.sample / factors
    step = sample.abs().amax(-1, keepdim=True).div(127).clamp(min=1e-12)
    error = (sample / step).round_().mul_(step).sub_(sample)
    return float((error @ (rows[::stride] * factors).t()).square().sum()) / max(len(sample), 1) * stride


def _to_int8(units: Tensor) -> Tensor:
    """The nearest int8 values within ± 127."""
    return units.round().clamp_(-127, 127).to(torch.int8)


def _shared_magnitudes(largest: Tensor) -> Tensor:
    """`largest` [..., out] with one common magnitude for all rows except outliers, which retain their own."""
    outlier = largest > OUTLIER * largest.median()
    return torch.where(outlier, largest, largest[~outlier].amax())


FORMATS.add("smoothquant", SmoothQuant)
