"""Linears with float8_e4m3fn weights in plain PyTorch: activations are rounded to e4m3 and multiplied in float32.

CPUs have no e4m3 arithmetic. `prepare_weight` widens weights to float32 at load, because converting takes 5 ns per weight, too long for
each step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion

FP8_MAX = 448.0  # the largest e4m3fn value


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """Widen the values of a CPU weight to float32; those of block formats are multiplied by their scales (`ops.prepare_weight`)."""
    if not weight.values.is_cpu:
        return weight
    return replace(weight, values=widen_blocks(weight) if weight.group_size else weight.values.float())


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """A linear with an FP8 weight (`ops.packed_linear`)."""
    scale = weight.scale
    assert scale is not None

    def product(rows: Tensor) -> Tensor:
        """Round the rows to e4m3 and multiply them by the widened weight."""
        if weight.group_size:
            wide = weight.values if weight.values.dtype == torch.float32 else widen_blocks(weight)
            out = F.linear(round_groups(rows.float(), weight.group_size), wide)
        else:
            out = F.linear(_round_activations(rows.float(), weight.activations, weight.input_scale), weight.values.float())
            out = out.mul_(scale)
        return (out if weight.bias is None else out.add_(weight.bias)).to(rows.dtype)

    return around(x, fusion, product)


def _round_activations(x: Tensor, activations: str, input_scale: Tensor | None) -> Tensor:
    """float32 x, rounded to multiples of e4m3 values by the scale that `activations` selects.

    none: not rounded; token: a scale per row; static: `input_scale`.
    """
    if activations == "none":
        return x
    scale = input_scale if activations == "static" else x.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    assert scale is not None, "static activations need an input scale"
    return _round_to_e4m3(x, scale.clamp(min=1e-12))


def _round_to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """float32: x ÷ scale rounded to the nearest e4m3 value, times scale. Values outside the range of e4m3 are clamped."""
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def round_groups(x: Tensor, size: int) -> Tensor:
    """float32 x [M, K] rounded to e4m3, with a scale for every `size` neighbouring features of a row. The result is dequantized."""
    groups = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    step = (groups.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return _round_to_e4m3(groups, step).flatten(-2)[..., : x.shape[-1]]


def widen_blocks(weight: PackedWeight) -> Tensor:
    """The dequantized weight, float32 [N, K]. Its scales [ceil(N / block_rows), ceil(K / group_size)] cover blocks."""
    assert weight.scale is not None
    rows = weight.scale.float().repeat_interleave(weight.block_rows, 0)[: weight.out_features]
    return weight.values.float() * rows.repeat_interleave(weight.group_size, 1)[:, : weight.in_features]
