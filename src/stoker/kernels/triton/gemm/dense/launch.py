"""Dense linears: few rows through the fused small kernels, many through the library's GEMM with the rest beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
from torch import Tensor

from stoker.kernels.triton import activation, norm
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.dense.kernel import gemv, small_linear
from stoker.kernels.triton.gemm.dense.tiles import MAX_ROWS, linear_tile, padded_rows
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import LinearTile
from stoker.kernels.types import PLAIN, Fusion

MAX_TILES = 1 << 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """See `ops.linear`."""
    if fusion.input_gate is not None:
        x, fusion = activation.gated(x, fusion.input_gate), replace(fusion, input_gate=None)
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0] // (2 if fusion.gate else 1))
    if x.shape[0] > MAX_ROWS:
        return many_rows(x, weight, bias, fusion)
    if fusion.norm_apart:  # a layer norm subtracts a mean, which the stream over K knows too late
        x = norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
        fusion = Fusion(gate=fusion.gate, residual=fusion.residual)
    return few_rows(x, weight, bias, fusion)


def many_rows(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor:
    """The library's GEMM; its epilogue takes the residual, or else the bias."""
    if fusion.norm_kind is not None:
        x = norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
    if fusion.residual is not None and fusion.gate is None:
        y = torch.addmm(fusion.residual, x, weight.t())
        return y if bias is None else y.add_(bias)
    y = torch.nn.functional.linear(x, weight, bias)
    if fusion.gate is not None:
        y = activation.gated(y, fusion.gate)
        if fusion.residual is not None:
            y = y + fusion.residual
    return y


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion, tile: LinearTile | None = None) -> Tensor:
    """At most MAX_ROWS rows, in one launch. `tile` stands in for the tuned choice."""
    m, k = x.shape
    gated = fusion.gate is not None
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    _check(x, weight, fusion, n)
    rows = padded_rows(m)
    tile = tile or linear_tile(rows, n, k, gated, weight.element_size(), num_sms(x.device), device_tuning(x.device))
    if fusion.norm_kind is not None and not tile.fuse_norm:
        x = norm.norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
        fusion = Fusion(gate=fusion.gate, residual=fusion.residual)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    flags = {
        "HAS_BIAS": bias is not None,
        "NORM": fusion.norm_kind is not None,
        "GATED": gated,
        "ACT": fusion.gate or "silu",
        "ADD": fusion.residual is not None,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_K": k % tile.block_k == 0,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **pdl_launch_options(x),
    }
    programs = triton.cdiv(n, tile.block_n)
    if rows == 1:
        gemv[(programs,)](x, weight, bias, fusion.norm_weight, fusion.residual, out, n, k, fusion.norm_eps, **flags)
        return out
    partial = arrived = None
    if tile.splits > 1:
        lines = (2 if gated else 1) * tile.block_n + 1
        partial = torch.empty((programs, tile.splits, lines, rows), dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
    small_linear[(programs, tile.splits)](
        x, weight, bias, fusion.norm_weight, fusion.residual, out, partial, arrived, m, n, k, x.stride(0), fusion.norm_eps,
        BLOCK_M=rows, SPLITS=tile.splits, **flags,
    )  # fmt: skip
    return out


@cache
def _arrived(device: torch.device) -> Tensor:
    """Counters of finished splits, one a tile; every launch leaves them at zero. Launches of one device run one after another."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def _check(x: Tensor, weight: Tensor, fusion: Fusion, n: int) -> None:
    if not weight.is_contiguous() or x.stride(-1) != 1:
        raise ValueError(f"a linear takes a dense weight and rows; strides are {weight.stride()} and {x.stride()}")
    if x.dtype != weight.dtype:
        raise ValueError(f"a linear takes rows and a weight of one dtype; they are {x.dtype} and {weight.dtype}")
    if fusion.residual is not None and (fusion.residual.shape != (x.shape[0], n) or not fusion.residual.is_contiguous()):
        raise ValueError(f"the residual must be dense [{x.shape[0]}, {n}]; it is {tuple(fusion.residual.shape)}")
