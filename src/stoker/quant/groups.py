"""Groups of neighbouring input features that share a scale: the arithmetic that int4 formats have in common."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# What a group knows besides its scale. none: codes around 8; int: a whole zero point; float: the real value of code 0.
Zero = Literal["none", "int", "float"]

SCALE_DTYPES = ("float16", "bfloat16", "float32")


def largest(sizes: tuple[int, ...], at_most: int, columns: int) -> int:
    """The largest group size that divides `columns`, up to `at_most`; that itself when none does."""
    return max((size for size in sizes if size <= at_most and columns % size == 0), default=at_most)


def split(weight: Tensor, group_size: int) -> Tensor:
    """float32 [..., out, groups, group_size]; a ragged last group is filled with its own last value, which changes no extreme."""
    wide, ragged = weight.float(), -weight.shape[-1] % group_size
    if ragged:
        wide = torch.cat((wide, wide[..., -1:].expand(*wide.shape[:-1], ragged)), dim=-1)
    return wide.unflatten(-1, (-1, group_size))


def join(groups: Tensor, in_features: int) -> Tensor:
    """[..., out, in] of [..., out, groups, group_size]: the inverse of `split`."""
    return groups.flatten(-2)[..., :in_features]


def bounds(groups: Tensor, zero: Zero, shrink: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """(lowest, highest) real value each group's codes span, [..., out, groups, 1]; `shrink` < 1 clips the extremes."""
    if zero == "none":
        most = groups.abs().amax(dim=-1, keepdim=True) * shrink
        return -most, most
    return groups.amin(dim=-1, keepdim=True).clamp(max=0) * shrink, groups.amax(dim=-1, keepdim=True).clamp(min=0) * shrink


def grid(low: Tensor, high: Tensor, zero: Zero, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, base) float32, as stored: code c of 0 … 15 stands for (c - base) × scale, or for c × scale + base when `zero` is float."""
    tiny = torch.finfo(dtype).smallest_normal
    # Symmetric codes run from 1 to 15 around 8, so that both extremes are reached.
    steps = 14 if zero == "none" else 15
    scale = ((high - low) * (1 / steps)).clamp(min=tiny).to(dtype).float()  # a factor, see FP8_UNIT
    if zero == "none":
        return scale, torch.full_like(scale, 8.0)
    if zero == "int":
        return scale, (-low / scale).round().clamp(0, 15)
    return scale, low.to(dtype).float()


def encode(values: Tensor, scale: Tensor, base: Tensor, zero: Zero) -> Tensor:
    """The nearest codes, float32 in 0 … 15."""
    codes = (values - base) / scale if zero == "float" else values / scale + base
    return codes.round().clamp(0, 15)


def decode(codes: Tensor, scale: Tensor, base: Tensor, zero: Zero) -> Tensor:
    return codes * scale + base if zero == "float" else (codes - base) * scale


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K / 2] of codes 0 … 15 [..., K]: feature 2i in the low nibble."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)
