"""Linears with float8_e4m3fn weights in plain PyTorch: activations are rounded to e4m3 and multiplied in float32.

CPUs have no e4m3 arithmetic. `prepare_fp8` widens weights to float32 at load, because converting takes 5 ns per weight, too long for each
step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.linear import around
from stoker.kernels.types import PLAIN, Fusion

FP8_MAX = 448.0  # the largest e4m3fn value


def prepare_fp8(weight: Tensor) -> Tensor:
    """See `ops.prepare_fp8`."""
    return weight if weight.is_cuda else weight.float()


def prepare_block_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """See `ops.prepare_block_fp8`."""
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
    """See `ops.fp8_linear`."""

    def product(rows: Tensor) -> Tensor:
        out = F.linear(_round_activations(rows.float(), activations, input_scale), weight.float()).mul_(scale)
        return (out if bias is None else out.add_(bias)).to(rows.dtype)

    return around(x, fusion, product)


def _round_activations(x: Tensor, activations: str, input_scale: Tensor | None) -> Tensor:
    """float32 x rounded to e4m3 × scale. `activations`: none, token (a scale per row) or static (`input_scale`)."""
    if activations == "none":
        return x
    scale = input_scale if activations == "static" else x.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    assert scale is not None, "static activations need an input scale"
    return _round_to_e4m3(x, scale.clamp(min=1e-12))


def _round_to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x rounded to the nearest e4m3 value × scale, float32."""
    return (x / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def block_fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], bias: Tensor | None = None, fusion: Fusion = PLAIN
) -> Tensor:
    """See `ops.block_fp8_linear`."""

    def product(rows: Tensor) -> Tensor:
        wide = weight if weight.dtype == torch.float32 else widen_blocks(weight, scale, block)
        out = F.linear(round_groups(rows.float(), block[1]), wide)
        return (out if bias is None else out.add_(bias)).to(rows.dtype)

    return around(x, fusion, product)


def round_groups(x: Tensor, size: int) -> Tensor:
    """float32 x [M, K] rounded to e4m3 × scale, with a scale for every `size` neighbouring features of a row."""
    groups = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    step = (groups.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return _round_to_e4m3(groups, step).flatten(-2)[..., : x.shape[-1]]


def widen_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [N, K]: weight × scale [ceil(N / rows), ceil(K / columns)], one scale per block of (rows, columns)."""
    wide = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    return weight.float() * wide
