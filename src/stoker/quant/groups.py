"""Groups of neighbouring input features that share a scale, and the arithmetic of int4 in groups."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# What a group stores besides its scale. none: nothing, values are around 8; int: a zero point; float: an offset, the real value of 0.
Zero = Literal["none", "int", "float"]

SCALE_DTYPES = ("float16", "bfloat16", "float32")


def largest_group_size(sizes: tuple[int, ...], limit: int, columns: int) -> int:
    """The largest of `sizes` that is at most `limit` and divides `columns`; `limit` if none does."""
    return max((size for size in sizes if size <= limit and columns % size == 0), default=limit)


def split(weight: Tensor, group_size: int) -> Tensor:
    """`weight` [..., out, in] in groups, float32 [..., out, groups, group_size].

    A shorter last group is filled with its last value, which does not change its extremes.
    """
    wide, ragged = weight.float(), -weight.shape[-1] % group_size
    if ragged:
        wide = torch.cat((wide, wide[..., -1:].expand(*wide.shape[:-1], ragged)), dim=-1)
    return wide.unflatten(-1, (-1, group_size))


def join(groups: Tensor, in_features: int) -> Tensor:
    """[..., out, in] from [..., out, groups, group_size]: the inverse of `split`."""
    return groups.flatten(-2)[..., :in_features]


def bounds(groups: Tensor, zero: Zero, shrink: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """(lowest, highest) real value that each group can represent, each [..., out, groups, 1]. A `shrink` below 1 clips the extremes."""
    if zero == "none":
        largest = groups.abs().amax(dim=-1, keepdim=True) * shrink
        return -largest, largest
    return groups.amin(dim=-1, keepdim=True).clamp(max=0) * shrink, groups.amax(dim=-1, keepdim=True).clamp(min=0) * shrink


def grid(low: Tensor, high: Tensor, zero: Zero, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, base) with which quantized values represent the range low … high, float32, rounded to the stored `dtype`.

    The real value of a quantized value q from 0 to 15 is (q − base) × scale, or q × scale + base when `zero` is float.
    """
    tiny = torch.finfo(dtype).smallest_normal
    # Symmetric values are 1 to 15 around 8, so that both extremes can be represented.
    steps = 14 if zero == "none" else 15
    scale = ((high - low) * (1 / steps)).clamp(min=tiny).to(dtype).float()  # multiplied for the reason given at FP8_UNIT
    if zero == "none":
        return scale, torch.full_like(scale, 8.0)
    if zero == "int":
        return scale, (-low / scale).round().clamp(0, 15)
    return scale, low.to(dtype).float()


def quantize(values: Tensor, scale: Tensor, base: Tensor, zero: Zero) -> Tensor:
    """The nearest quantized values, as float32 from 0 to 15. `scale` and `base` are results of `grid`."""
    units = (values - base) / scale if zero == "float" else values / scale + base
    return units.round().clamp(0, 15)


def dequantize(quantized: Tensor, scale: Tensor, base: Tensor, zero: Zero) -> Tensor:
    """The real values of quantized values, float32. `scale` and `base` are results of `grid`."""
    return quantized * scale + base if zero == "float" else (quantized - base) * scale


def pack(quantized: Tensor) -> Tensor:
    """uint8 [..., K / 2] from values 0 to 15 [..., K]: feature 2i in the low four bits of byte i, feature 2i + 1 in the high four."""
    pairs = quantized.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)
