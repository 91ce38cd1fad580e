"""Weight-only FP4 (e2m1) in groups of input features: MXFP4 and NVFP4 checkpoints with their stored bits. Activations are not quantized."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from stoker.base.config import check_choice
from stoker.base.errors import ConfigError
from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels.reference.quant_int4 import FP4_VALUES
from stoker.quant import groups
from stoker.quant.format import FORMATS, Format, Layout

GROUP_SIZES = (16, 32, 64, 128)


class Fp4(Format, frozen=True, kw_only=True, tag="fp4"):
    """`weight` uint8 [(experts,) out, in / 2], two e2m1 values per byte, the even feature in the low four bits; and by `scale`:

        e8m0    `scale` uint8 [(experts,) out, groups]; real = value × 2 ** (scale − 127)                        MXFP4
        e4m3    `scale` float8_e4m3fn [(experts,) out, groups], `row_scale` float32 [(experts,) out];
                real = value × (scale × row_scale)                                                               NVFP4

    NVFP4 has one float32 scale per tensor. It is stored per row, because the parts of a fused linear and experts have scales of their own.
    The last group of a row may be shorter.
    """

    group_size: int = 32
    scale: Literal["e8m0", "e4m3"] = "e8m0"

    def __post_init__(self) -> None:
        check_choice("group_size", self.group_size, GROUP_SIZES)

    def aligned_to(self, rows: int, columns: int) -> Fp4:
        """This format with groups that divide `columns`, where possible. Smaller groups repeat the scale of the group they are cut from."""
        return msgspec.structs.replace(self, group_size=groups.largest_group_size(GROUP_SIZES, self.group_size, columns))

    def layout(self, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Layout]:
        """The stored tensors by suffix, as `Format.layout` requires. Raises ConfigError for a shape that it cannot store."""
        *experts, rows, size = spec.weight_shape
        if size % 2:
            problem = f"{spec.name}: FP4 stores two input features per byte, which {size} features cannot fill."
            raise ConfigError(problem, cure="Use INT8.")
        axis = len(experts)
        scales = (*experts, rows, -(-size // self.group_size))
        scale_dtype = torch.uint8 if self.scale == "e8m0" else torch.float8_e4m3fn
        stored = {
            "weight": Layout((*experts, rows, size // 2), torch.uint8, row_axis=axis, col_axis=axis + 1, col_unit=2),
            "scale": Layout(scales, scale_dtype, row_axis=axis, col_axis=axis + 1, col_unit=self.group_size),
        }
        if self.scale == "e4m3":
            stored["row_scale"] = Layout((*experts, rows), torch.float32, row_axis=axis)
        return stored

    def quantize(self, weight: Tensor, spec: LinearSpec, stats: Any = None) -> dict[str, Tensor]:
        """The stored tensors of `weight`, as `Format.quantize` requires: values are rounded to the nearest, and no group is clipped."""
        split = groups.split(weight, self.group_size)
        needed = split.abs().amax(-1).clamp(min=2.0**-100) / FP4_VALUES[7]  # the smallest scale with which the largest value fits
        if self.scale == "e8m0":
            stored = {"scale": (needed.log2().ceil() + 127).to(torch.uint8)}
            real = powers_of_two(stored["scale"]).float()
        else:
            row_scale = needed.amax(-1) / torch.finfo(torch.float8_e4m3fn).max
            stored = {"scale": (needed / row_scale[..., None]).clamp(min=2.0**-9).to(torch.float8_e4m3fn), "row_scale": row_scale}
            real = stored["scale"].float() * row_scale[..., None]
        scaled = split / real[..., None]
        midpoints = torch.tensor([(low + high) / 2 for low, high in pairwise(FP4_VALUES[:8])], device=weight.device)
        values = torch.bucketize(scaled.abs(), midpoints) + 8 * (scaled < 0)
        return {"weight": groups.pack(groups.join(values, weight.shape[-1])), **stored}

    def pack(self, tensors: dict[str, Tensor], bias: Tensor | None) -> PackedWeight:
        """The packed weight for the kernels, as `Format.pack` requires.

        Scales become bfloat16, which holds them exactly, and also their products with the values: six significant bits at most.
        """
        values, scale = tensors.pop("weight"), tensors.pop("scale")
        real = powers_of_two(scale) if self.scale == "e8m0" else scale.bfloat16()
        return PackedWeight("int4", values, real, None, self.group_size, bias=bias, is_fp4=True, row_scale=tensors.pop("row_scale", None))


def powers_of_two(exponents: Tensor) -> Tensor:
    """bfloat16: 2 ** (e − 127) for the bytes e of `exponents`. Not for 255, which e8m0 defines as NaN; imports refuse it.

    A byte is the exponent field of a bfloat16, except 0, which is its subnormal number 2 ** −127.
    """
    bits = exponents.to(torch.int16) << 7
    return torch.where(exponents == 0, 0x0040, bits).to(torch.int16).view(torch.bfloat16)


FORMATS.add("fp4", Fp4)
