"""No quantization: weights in the engine's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.quant.format import FORMATS, Format, Layout


class Dense(Format, frozen=True, tag="dense"):
    """`weight` [(experts,) out, in] in the engine's dtype."""

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires."""
        axis = len(spec.weight_shape) - 2
        return {"weight": Layout(spec.weight_shape, dtype, row_axis=axis, col_axis=axis + 1)}

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: object = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires."""
        return {"weight": weight}

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires."""
        return PackedWeight("dense", tensors.pop("weight"), bias=bias)


FORMATS.add("dense", Dense)
