"""Linears of many rows whose epilogue applies a gate or adds a residual, where that is faster than the library's GEMM and a further kernel.

Time of the library with separate kernels ÷ time here, on an H100, 1024, 2048 and 8192 rows (benchmarks/results/h100_large_gemm.json):

    |                           | 8B             | 70B            | 8B, one of two ranks | 70B, one of two ranks |
    | bfloat16, gate and up     | 1.09 1.07 1.09 | 1.01 1.03 1.05 | (0.94) 1.09 1.07     | 1.04 1.01 1.04        |
    | bfloat16, out + residual  | 1.06 1.06 1.05 | 1.03 1.03 1.04 |
    | bfloat16, down + residual | 1.07 1.01 1.02 | (1.01 0.96 1.03)
    | FP8, out + residual       | 1.08 1.07 1.17 | 1.09 1.06 1.08 |
    | FP8, down + residual      | 1.05 1.08 1.02 | 1.02 1.02 1.02 |
    | FP8, gate and up          | (1.07 1.02 0.96) (1.01 0.99 1.06) (0.95 1.06 0.96) (1.03 0.99 0.98)

Those in parentheses use the library. The product alone takes 0.95 to 1.11 times as long as the library's where tiles fill the SMs, so
linears without a gate or a residual use the library, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.large.kernel import large_gemm_kernel
from stoker.kernels.types import Fusion


class LargeGemmTile(NamedTuple):
    """The output tile of a CTA, the depth of its pipeline, and the order of tiles."""

    block_m: int  # rows of x
    block_n: int  # rows of the weight
    num_stages: int
    group_m: int  # tiles of rows that share a tile of the weight in L2


TILE = LargeGemmTile(128, 256, 4, 16)
MIN_ROWS = 1024
MAX_ROW_BYTES = 32 << 10  # of x: with longer rows, adding the residual is too small a part of the time
MIN_OCCUPANCY = 0.85  # the library has other tiles, with which the last round leaves fewer SMs idle
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
_REGISTERS = 168  # per thread at the start: what three warpgroups of one CTA can have


def is_faster(x: Tensor, weight: Tensor, fusion: Fusion) -> bool:
    """Whether `large_gemm` supports the product of x [m, k] and weight [n, k] with the gate or residual of `fusion`, and is faster.

    x and weight have the same dtype: bfloat16, float16 or float8_e4m3fn.
    """
    m, n = x.shape[0], weight.shape[0] // (2 if fusion.gate else 1)
    if fusion.gate is not None:
        has_faster_epilogue = x.itemsize == 2
    else:
        has_faster_epilogue = fusion.residual is not None and x.shape[1] * x.itemsize <= MAX_ROW_BYTES
    if m < MIN_ROWS or not has_faster_epilogue or not supports(x, "large_gemm"):
        return False
    if x.dtype not in _TYPES or x.dtype != weight.dtype or n % 8 or not (_has_descriptor(x) and _has_descriptor(weight)):
        return False
    if fusion.residual is not None and not (fusion.residual.is_contiguous() and fusion.residual.shape == (m, n)):
        return False
    # The ahead-of-time trace runs few numbers of rows, and must list the kernel if any number uses it.
    return x.is_meta or occupancy(m, n, fusion.gate, num_sms(x.device)) >= MIN_OCCUPANCY


def occupancy(m: int, n: int, gate: str | None, num_sms: int) -> float:
    """The used part of all SMs over the rounds of tiles that an output [m, n] takes."""
    tiles = _count_tiles(m, n, TILE, gate)
    return tiles / (triton.cdiv(tiles, num_sms) * num_sms)


def large_gemm(
    x: Tensor,
    weight: Tensor,
    tile: LargeGemmTile = TILE,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
) -> Tensor:
    """gate(x × weightᵀ × scales + bias) + residual, [m, n], for x [m, k] and weight [n, k], or [2 × n, k] with a gate.

    x and weight are bfloat16 or float16, as is the result, or both float8_e4m3fn with float32 scales x_scale [m] and weight_scale [rows of
    the weight]; the result is bfloat16. Rows must begin at multiples of 16 bytes; `residual` [m, n] and the scales are dense.
    """
    m, k = x.shape
    n = weight.shape[0] // (2 if gate else 1)
    out = torch.empty((m, n), dtype=torch.bfloat16 if x.itemsize == 1 else x.dtype, device=x.device)
    half, block_k = tile.block_n // 2, 128 // x.itemsize
    large_gemm_kernel[(min(num_sms(x.device), _count_tiles(m, n, tile, gate)),)](
        _descriptor(x, tile.block_m, block_k),
        _descriptor(weight, half, block_k),
        _descriptor(out, tile.block_m // 2, half // 2),
        x_scale,
        weight_scale,
        bias,
        residual,
        m,
        n,
        k,
        TILE=tile,
        GATE=gate,
        num_warps=4,
        maxnreg=_REGISTERS,
    )
    return out


def _count_tiles(m: int, n: int, tile: LargeGemmTile, gate: str | None) -> int:
    """The number of tiles of an output [m, n]."""
    return triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n // (2 if gate else 1))


def _has_descriptor(x: Tensor) -> bool:
    """Whether TMA can copy x: rows are dense, and begin at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of x for copies of `rows` rows and `columns` columns. It is a kernel argument, so a graph captures it."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)
