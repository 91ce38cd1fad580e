"""Linears with float8_e4m3fn weights in plain torch. Activations are rounded to e4m3; products are those of the rounded values.

CPUs have no e4m3 arithmetic, so weights come widened by `prepare_fp8`: converting takes 5 ns a weight, too long for every step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion

FP8_MAX = 448.0  # of e4m3fn


def prepare_fp8(weight: Tensor) -> Tensor:
    return weight if weight.is_cuda else weight.float()


def prepare_block_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    return weight if weight.is_cuda else widen_blocks(weight, scale, block)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    activations: str,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    fusion: Fusion = PLAIN,
) -> Tensor:
    def product(rows: Tensor) -> Tensor:
        out = F.linear(_rounded(rows.float(), activations, input_scale), weight.float()).mul_(scale)
        return (out if bias is None else out.add_(bias)).to(rows.dtype)

    return around(x, fusion, product)


def _rounded(x: Tensor, activations: str, input_scale: Tensor | None) -> Tensor:
    """float32 x on the e4m3 grid of its scale; `activations`: none, token (each row's own scale) or static (input_scale)."""
    if activations == "none":
        return x
    scale = input_scale if activations == "static" else x.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    assert scale is not None, "static activations need an input scale"
    return _to_grid(x, scale.clamp(min=1e-12))


def _to_grid(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def block_fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    def product(rows: Tensor) -> Tensor:
        wide = weight if weight.dtype == torch.float32 else widen_blocks(weight, scale, block)
        out = F.linear(round_groups(rows.float(), block[1]), wide)
        return (out if bias is None else out.add_(bias)).to(rows.dtype)

    return around(x, fusion, product)


def round_groups(x: Tensor, size: int) -> Tensor:
    """float32 x [M, K] on the e4m3 grid of each `size` neighbouring features' own scale."""
    groups = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    step = (groups.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return _to_grid(groups, step).flatten(-2)[..., : x.shape[-1]]


def widen_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 of weight [N, K] × scale [ceil(N / rows), ceil(K / columns)], each scale over its block."""
    wide = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    return weight.float() * wide
