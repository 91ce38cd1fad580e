"""Weight-only int8 with a scale for each output row. Activations are not quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.format import FORMATS, Format, Layout

INT8_UNIT = 1 / 127  # multiplied for the reason given at FP8_UNIT


class Int8(Format, frozen=True, kw_only=True, tag="int8"):
    """`weight` int8 [(experts,) out, in], `scale` float32 [(experts,) out]: real = weight × scale."""

    @property
    def rows_per_call(self) -> int | None:
        """The number of output rows that one call of `quantize` needs."""
        return 1

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires."""
        axis = len(spec.weight_shape) - 2
        return {
            "weight": Layout(spec.weight_shape, torch.int8, row_axis=axis, col_axis=axis + 1),
            "scale": Layout(spec.weight_shape[:-1], torch.float32, row_axis=axis),
        }

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires."""
        values, scale = quantize_rows(weight)
        return {"weight": values, "scale": scale}

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        return PackedWeight("int8", tensors.pop("weight"), tensors.pop("scale"), bias=bias)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 values within ± 127, float32 scales [..., out]) of `weight` [..., out, in]. A scale is the row's largest magnitude ÷ 127."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=-1) * INT8_UNIT).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8), scale


FORMATS.add("int8", Int8)
