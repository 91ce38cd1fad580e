"""Dense linears: up to 64 tokens by the fused small kernels; more by the library's GEMM with separate kernels around it. `gemm.large`
computes those of more than 32 tokens for which it is faster.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from stoker.kernels.triton import activation, norm
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.dense.kernel import gemv_kernel, small_gemm_kernel
from stoker.kernels.triton.gemm.dense.tiles import MAX_ROWS, linear_tile, padded_rows
from stoker.kernels.triton.gemm.large import launch as large
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import LinearTile
from stoker.kernels.types import PLAIN, Fusion

MAX_TILES = 1 << 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """x × weightᵀ + bias with `fusion` (`ops.linear`): by `gemm.large` where it is faster, else by the kernels here up to MAX_ROWS rows."""
    if x.dtype != weight.dtype:
        raise ValueError(f"x and the weight of a linear must have one dtype; they are {x.dtype} and {weight.dtype}: convert one of them")
    if fusion.input_gate is not None:
        x, fusion = activation.gated(x, fusion.input_gate), replace(fusion, input_gate=None)
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0] // (2 if fusion.gate else 1))
    tile = large.faster_tile(x, weight, fusion, bias is not None)
    if tile is not None or x.shape[0] > MAX_ROWS:
        if fusion.norm_kind is not None:
            x, fusion = _apply_norm(x, fusion)
        if x.is_meta:  # the ahead-of-time trace runs few numbers of rows, and must list the tiles of all
            for each in large.tiles_of_any_rows(x, weight, fusion, bias is not None):
                large.large_gemm(x, weight, each, bias=bias, residual=fusion.residual, gate=fusion.gate)
        if tile is not None:
            return large.large_gemm(x, weight, tile, bias=bias, residual=fusion.residual, gate=fusion.gate)
        return library_linear(x, weight, bias, fusion)
    if fusion.needs_separate_norm:
        x, fusion = _apply_norm(x, fusion)
    return small_linear(x, weight, bias, fusion)


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """x × weightᵀ + bias with `fusion`, by the library's GEMM, whose epilogue adds the residual or else the bias."""
    if fusion.norm_kind is not None:
        x, fusion = _apply_norm(x, fusion)
    if fusion.residual is not None and fusion.gate is None:
        y = torch.addmm(fusion.residual, x, weight.t())
        return y if bias is None else y.add_(bias)
    y = torch.nn.functional.linear(x, weight, bias)
    if fusion.gate is not None:
        y = activation.gated(y, fusion.gate)
        if fusion.residual is not None:
            y = y + fusion.residual
    return y


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion, tile: LinearTile | None = None) -> Tensor:
    """x × weightᵀ + bias with `fusion` for at most MAX_ROWS tokens, in one launch, or two if the tile does not fuse the norm.

    x of 16 bits and a weight in float32 have a float32 result: x is widened in registers. `tile` overrides the tuned choice. Raises
    ValueError for strides, dtypes or a residual that the kernels do not support.
    """
    m, k = x.shape
    gated = fusion.gate is not None
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    _check(x, weight, fusion, n)
    block_m = padded_rows(m)
    tile = tile or linear_tile(block_m, n, k, gated, weight.element_size(), num_sms(x.device), device_tuning(x.device))
    if fusion.norm_kind is not None and not tile.fuse_norm:
        x, fusion = _apply_norm(x, fusion)
    out = torch.empty((m, n), dtype=weight.dtype, device=x.device)
    options = {
        "GATED": gated,
        "ACTIVATION": fusion.gate or "silu",
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_K": k % tile.block_k == 0,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **pdl_launch_options(x),
    }
    num_tiles = cdiv(n, tile.block_n)
    if m == 1:
        gemv_kernel[(num_tiles,)](x, weight, bias, fusion.norm_weight, fusion.residual, out, n, k, fusion.norm_eps, **options)
        return out
    partial = finished = None
    if tile.splits > 1:
        assert num_tiles <= MAX_TILES
        partial_rows = (2 if gated else 1) * tile.block_n + 1
        partial = torch.empty((num_tiles, tile.splits, partial_rows, block_m), dtype=torch.float32, device=x.device)
        finished = _split_counters(x.device)
    small_gemm_kernel[(num_tiles, tile.splits)](
        x,
        weight,
        bias,
        fusion.norm_weight,
        fusion.residual,
        out,
        partial,
        finished,
        m,
        n,
        k,
        x.stride(0),
        fusion.norm_eps,
        BLOCK_M=block_m,
        SPLITS=tile.splits,
        **options,
    )
    return out


def _apply_norm(x: Tensor, fusion: Fusion) -> tuple[Tensor, Fusion]:
    """(x after the norm, the fusion without it). A kernel of its own computes the norm.

    A layer norm always needs it: it subtracts a mean.
    """
    x = norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind or "rms")
    return x, Fusion(gate=fusion.gate, residual=fusion.residual)


@cache
def _split_counters(device: torch.device) -> Tensor:
    """Counters of finished splits, one int32 per tile: zero after every launch. The launches of a device run one after another."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def _check(x: Tensor, weight: Tensor, fusion: Fusion, n: int) -> None:
    """Raise ValueError for strides or a residual that the kernels do not support. n is the number of outputs."""
    if not weight.is_contiguous() or x.stride(-1) != 1:
        raise ValueError(
            f"a linear needs a dense weight and rows of x that are dense, but their strides are {weight.stride()} and {x.stride()}: "
            "make them contiguous"
        )
    if fusion.residual is not None and (fusion.residual.shape != (x.shape[0], n) or not fusion.residual.is_contiguous()):
        shape, strides = tuple(fusion.residual.shape), fusion.residual.stride()
        raise ValueError(f"the residual of this linear must be dense [{x.shape[0]}, {n}], but has shape {shape} and strides {strides}")
