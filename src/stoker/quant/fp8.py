"""FP8 (arXiv 2209.05433): e4m3 weights, and e4m3 activations by each token's own scale or by a measured one."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.compensate import compensated
from stoker.quant.format import FORMATS, Format, Layout
from stoker.quant.stats import InputStats

FP8_MAX = 448.0  # of e4m3fn
# A factor, not a divisor: a GPU divides by a constant as it multiplies by this, and all devices shall store the same scales.
FP8_UNIT = 1 / FP8_MAX
DAMP = 0.01  # of compensation
TOGETHER = 16  # columns that are rounded at once: on SmolLM2 as good as one at a time, and a sixteenth of the steps
_LIBRARY_ROWS = 65  # on a GPU, codes of so many rows are made in a pass of their own, which takes a gate along


class Fp8(Format, frozen=True, kw_only=True, tag="fp8"):
    """`weight` float8_e4m3fn [(experts,) out, in], `scale` float32 [(experts,) out], equal for all rows of a part when `weights` is tensor.

    `activations`: token (each row's largest magnitude), static (`input_scale` float32 [1], measured) or none (they stay as they are).
    On a CPU the weight is widened at load: the numbers are those of FP8, the memory is not.
    """

    weights: Literal["channel", "tensor"] = "channel"
    activations: Literal["token", "static", "none"] = "token"
    compensate: bool = False  # each columns' rounding errors are made up for by later ones, as GPTQ does; wants calibration

    @property
    def needs_calibration(self) -> bool:
        return self.compensate or self.activations == "static"

    @property
    def rows_together(self) -> int | None:
        return 1 if self.weights == "channel" else None

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        lead = len(spec.weight_shape) - 2
        stored = {
            "weight": Layout(spec.weight_shape, torch.float8_e4m3fn, row_axis=lead, col_axis=lead + 1),
            "scale": Layout(spec.weight_shape[:-1], torch.float32, row_axis=lead),
        }
        return stored | {"input_scale": Layout((1,), torch.float32)} if self.activations == "static" else stored

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: InputStats | None = None) -> dict[str, Tensor]:
        if stats is None and self.needs_calibration:
            what = "static activations need" if self.activations == "static" else "compensation needs"
            raise ConfigError(f"{spec.name}: {what} measured inputs.", cure="Calibrate, or use activations=token and compensate=false.")
        scale = self._scale(weight, spec)
        if stats is not None and self.compensate:
            codes = _codes(compensated(weight, scale, stats, DAMP, TOGETHER, _codes) / scale)
        else:
            codes = (weight / scale).to(torch.float8_e4m3fn)  # within ± 448 by its scale; a pass over the weight less
        stored = {"weight": codes, "scale": scale.squeeze(-1).contiguous()}
        if stats is None or self.activations != "static":
            return stored
        return stored | {"input_scale": (stats.amax.amax() * FP8_UNIT).clamp(min=1e-12).reshape(1)}

    def _scale(self, weight: Tensor, spec: LinearSpec) -> Tensor:
        """float32 [..., out, 1]."""
        most = weight.abs().amax(dim=-1, keepdim=True).float()
        if self.weights == "tensor":
            most = torch.cat([part.amax(dim=-2, keepdim=True).expand_as(part) for part in most.split(spec.parts, dim=-2)], dim=-2)
        return (most * FP8_UNIT).clamp(min=1e-12)

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        values, scale, input_scale = tensors.pop("weight"), tensors.pop("scale"), tensors.pop("input_scale", None)
        return PackedWeight("fp8", values, scale, bias=bias, activations=self.activations, input_scale=input_scale)

    def min_input_gate_rows(self, weight: PackedWeight) -> float:
        return math.inf if weight.values.is_cpu or self.activations == "none" else _LIBRARY_ROWS


def _codes(units: Tensor) -> Tensor:
    return units.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


FORMATS.add("fp8", Fp8)
