"""FP8 (arXiv 2209.05433): e4m3 weights, and e4m3 activations with a scale per token or a static one."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.calibration.error_compensation import compensate_errors
from stoker.quant.calibration.input_stats import InputStats
from stoker.quant.format import FORMATS, Format, Layout

FP8_MAX = 448.0  # the largest e4m3fn value
# Scales are computed by multiplication with this, not by division: GPUs replace a division by a constant by a multiplication, and all
# devices must store the same scales.
FP8_UNIT = 1 / FP8_MAX
DAMPING = 0.01  # of error compensation
COLUMNS_PER_STEP = 16  # rounded together by error compensation: on SmolLM2 as accurate as one at a time, in a sixteenth of the steps
# Rows from which a GPU quantizes activations in a launch of its own, which applies an input gate too.
MIN_QUANTIZATION_LAUNCH_ROWS = 65


class Fp8(Format, frozen=True, kw_only=True, tag="fp8"):
    """`weight` float8_e4m3fn [(experts,) out, in], `scale` float32 [(experts,) out], equal for all rows of a part if `weights` is tensor.

    `activations`: token (the scale is each row's largest magnitude ÷ 448), static (`input_scale` float32 [1], measured by calibration) or
    none (activations are not quantized). On a CPU the weight is widened at load: results are those of FP8, memory is that of float32.
    """

    weights: Literal["channel", "tensor"] = "channel"
    activations: Literal["token", "static", "none"] = "token"
    compensate: bool = False  # error compensation, as in GPTQ. Needs calibration

    @property
    def needs_calibration(self) -> bool:
        """Whether `quantize` needs measured inputs."""
        return self.compensate or self.activations == "static"

    @property
    def rows_per_call(self) -> int | None:
        """The number of output rows that one call of `quantize` needs."""
        return 1 if self.weights == "channel" else None

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires."""
        axis = len(spec.weight_shape) - 2
        stored = {
            "weight": Layout(spec.weight_shape, torch.float8_e4m3fn, row_axis=axis, col_axis=axis + 1),
            "scale": Layout(spec.weight_shape[:-1], torch.float32, row_axis=axis),
        }
        return stored | {"input_scale": Layout((1,), torch.float32)} if self.activations == "static" else stored

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires. Raises ConfigError without `stats` if it needs them."""
        if stats is None and self.needs_calibration:
            what = "static activations need" if self.activations == "static" else "error compensation needs"
            raise ConfigError(f"{spec.name}: {what} measured inputs.", cure="Calibrate, or use activations=token and compensate=false.")
        scale = self._scale(weight, spec)
        if stats is not None and self.compensate:
            values = _to_e4m3(compensate_errors(weight, scale, stats, DAMPING, COLUMNS_PER_STEP, _to_e4m3) / scale)
        else:
            values = (weight / scale).to(torch.float8_e4m3fn)  # the scale keeps it within ± 448, so clamping would be a wasted pass
        stored = {"weight": values, "scale": scale.squeeze(-1).contiguous()}
        if stats is None or self.activations != "static":
            return stored
        return stored | {"input_scale": (stats.amax.amax() * FP8_UNIT).clamp(min=1e-12).reshape(1)}

    def _scale(self, weight: Tensor, spec: LinearSpec) -> Tensor:
        """The scales of the weight's rows, float32 [..., out, 1]."""
        largest = weight.abs().amax(dim=-1, keepdim=True).float()
        if self.weights == "tensor":
            parts = largest.split(spec.parts, dim=-2)
            largest = torch.cat([part.amax(dim=-2, keepdim=True).expand_as(part) for part in parts], dim=-2)
        return (largest * FP8_UNIT).clamp(min=1e-12)

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        values, scale, input_scale = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("input_scale", None)
        return PackedWeight("fp8", values, scale, bias=bias, activations=self.activations, input_scale=input_scale)

    def min_input_gate_rows(self, weight: PackedWeight) -> float:
        """The number of rows from which a fused input gate is faster."""
        return math.inf if weight.values.is_cpu or self.activations == "none" else MIN_QUANTIZATION_LAUNCH_ROWS


def _to_e4m3(units: Tensor) -> Tensor:
    """The nearest e4m3 values; magnitudes above 448 are clamped."""
    return units.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


FORMATS.add("fp8", Fp8)
