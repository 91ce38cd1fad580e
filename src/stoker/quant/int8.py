"""Weight-only int8: a scale for each output row, activations as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.format import FORMATS, Format, Layout

INT8_UNIT = 1 / 127  # a factor, see FP8_UNIT


class Int8(Format, frozen=True, kw_only=True, tag="int8"):
    """`weight` int8 [(experts,) out, in], `scale` float32 [(experts,) out]: real = weight × scale."""

    @property
    def rows_together(self) -> int | None:
        return 1

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        lead = len(spec.weight_shape) - 2
        return {
            "weight": Layout(spec.weight_shape, torch.int8, row_axis=lead, col_axis=lead + 1),
            "scale": Layout(spec.weight_shape[:-1], torch.float32, row_axis=lead),
        }

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        codes, scale = round_rows(weight)
        return {"weight": codes, "scale": scale}

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        return PackedWeight("int8", tensors.pop("weight"), tensors.pop("scale"), bias=bias)


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes within ± 127, float32 scale): each row of [..., out, in] to the nearest step of its largest magnitude ÷ 127."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=-1) * INT8_UNIT).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8), scale


FORMATS.add("int8", Int8)
