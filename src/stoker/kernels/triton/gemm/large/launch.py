"""Launches the GEMM for many rows, and says where it is faster than other kernels (`tiles`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.large.kernel import CONSUMER_ROWS, large_gemm_kernel
from stoker.kernels.triton.gemm.large.tiles import (
    BLOCK_BYTES,
    MAX_SPLIT_TILES,
    MEDIUM_ROWS,
    MIN_OCCUPANCY,
    MIN_ROWS,
    TILE,
    LargeGemmTile,
    count_tiles,
    medium_tile,
    occupancy,
    sixteen_bit_tile,
    sixteen_bit_tiles,
    split_tiles,
)
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.types import Fusion


class Digits(NamedTuple):
    """What rows of int8 digits do not say about the 16-bit rows that they are."""

    rows: int
    dtype: torch.dtype


MAX_ROW_BYTES = 32 << 10  # of x: with longer rows, adding the residual is too small a part of the time
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8}
DIGIT_ROWS = range(129, 2049)  # of 16-bit rows × int8 weights: fewer have other kernels, and the weight is dequantized for more
MAX_DIGIT_FEATURES = 1 << 17  # 127 × 127 times as many fit int32
_CONSUMER_ROWS = CONSUMER_ROWS.value
_REGISTERS = {1: 168, 2: 168, 3: 128}  # by consumers, per thread at the start: what two to four warpgroups of one CTA can have


def faster_tile(x: Tensor, weight: Tensor, fusion: Fusion, is_biased: bool = False) -> LargeGemmTile | None:
    """The tile with which `large_gemm` is faster for x [m, k] × weight [n, k] with the gate or residual of `fusion`, and perhaps a bias.

    x and weight have the same dtype: bfloat16, float16 or float8_e4m3fn. None: it is not faster, or does not support the product.
    """
    m, n = x.shape[0], weight.shape[0] // (2 if fusion.gate else 1)
    if not _is_supported(x, weight, fusion):
        return None
    if m in MEDIUM_ROWS and x.itemsize == 1:
        return medium_tile(m, n, x.shape[1], fusion.gate, num_sms(x.device))
    if m < MIN_ROWS and x.itemsize == 2:
        return sixteen_bit_tile(m, n, x.shape[1], fusion.gate, fusion.residual is not None, is_biased, num_sms(x.device))
    if fusion.gate is not None:
        has_faster_epilogue = x.itemsize == 2
    else:
        has_faster_epilogue = fusion.residual is not None and x.shape[1] * x.itemsize <= MAX_ROW_BYTES
    if m < MIN_ROWS or not has_faster_epilogue:
        return None
    # The ahead-of-time trace runs few numbers of rows, and must list the kernel if any number uses it.
    return TILE if x.is_meta or occupancy(m, n, fusion.gate, num_sms(x.device)) >= MIN_OCCUPANCY else None


def tiles_of_any_rows(x: Tensor, weight: Tensor, fusion: Fusion, is_biased: bool) -> tuple[LargeGemmTile, ...]:
    """The tiles with which `large_gemm` multiplies any number of rows of 16 bits, from 65 to `MIN_ROWS` - 1, by this weight."""
    if x.itemsize != 2 or x.shape[0] not in MEDIUM_ROWS or not _is_supported(x, weight, fusion):
        return ()
    n = weight.shape[0] // (2 if fusion.gate else 1)
    return sixteen_bit_tiles(n, x.shape[1], fusion.gate, fusion.residual is not None, is_biased, num_sms(x.device))


def _is_supported(x: Tensor, weight: Tensor, fusion: Fusion) -> bool:
    """Whether `large_gemm` multiplies x [m, k] by weight [n, k] with `fusion`."""
    m, n = x.shape[0], weight.shape[0] // (2 if fusion.gate else 1)
    if x.dtype not in _TYPES or x.dtype != weight.dtype or n % 8 or not (_has_descriptor(x) and _has_descriptor(weight)):
        return False
    if not supports(x, "large_gemm"):
        return False
    return fusion.residual is None or (fusion.residual.is_contiguous() and fusion.residual.shape == (m, n))


def supports_digits(x: Tensor, weight: Tensor) -> bool:
    """Whether `large_gemm` multiplies rows x [m, k], as digits, by an int8 weight [n, k], faster than the library if it is dequantized.

    Up to 256 rows, the quantized kernel may be faster yet (`digits_take_one_round`). Llama-3.1-8B's linears with the norm before them,
    library → here, µs on an H200 (benchmarks/results/h200_decode_products.json):

        | rows | head        | gate, up  | down      |
        | 256  | 784 → 376   | 177 → 101 | 104 → 81  |
        | 512  | 1097 → 700  | 252 → 166 | 134 → 91  |
        | 768  | 1440 → 1012 | 327 → 248 | 176 → 164 |
        | 1024 | 1774 → 1340 | 405 → 310 | 212 → 172 |
        | 2048 | 3156 → 2705 | 708 → 627 | 371 → 337 |
    """
    n, k = weight.shape
    is_supported = x.itemsize == 2 and n % 8 == 0 and k % 16 == 0 and k <= MAX_DIGIT_FEATURES and _has_descriptor(weight)
    return is_supported and x.shape[0] in DIGIT_ROWS and supports(x, "large_gemm")


def supports_experts(weight: Tensor) -> bool:
    """Whether `large_gemm` multiplies by weights of experts, [experts, n, k]."""
    is_supported = weight.dtype in (torch.float8_e4m3fn, torch.bfloat16) and weight.is_contiguous() and weight.shape[1] % 8 == 0
    return is_supported and _has_descriptor(weight.flatten(0, 1)) and supports(weight, "large_gemm")


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
    digits: Digits | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """gate(x × weightᵀ × scales + bias) + residual, [m, n], for x [m, k] and weight [n, k], or [2 × n, k] with a gate.

    x and weight are bfloat16 or float16, as is the result, or both float8_e4m3fn with float32 scales x_scale [m] and weight_scale [rows of
    the weight]; the result is bfloat16. Rows must begin at multiples of 16 bytes; `residual` [m, n] and the scales are dense.
    With `digits`, both are int8 with scales, and x are slabs of digits (`digits.py`); there is no gate, residual or split-K.
    With `offsets`, int32 [experts + 1], weight is [experts, n or 2 × n, k], as are its scales and bias without k: rows of x from offsets[e]
    to offsets[e + 1] are multiplied by the weight of expert e (`experts.py`); there are no digits, residual or split-K.
    Without `offsets`, the first copies of the weight start before the launch before this one has ended, which must not write the weight.
    """
    rows, k = x.shape
    n, experts = weight.shape[-2] // (2 if gate else 1), 0 if offsets is None else len(weight)
    m, dtype = digits or (rows, torch.bfloat16 if x.itemsize == 1 else x.dtype)
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    half, block_k = tile.block_n // 2, BLOCK_BYTES // x.itemsize
    # An expert has less than one tile of rows more than its rows fill.
    tiles, consumers = count_tiles(rows + experts * (tile.block_m - 1), n, tile, gate), tile.block_m // _CONSUMER_ROWS
    partial = finished = None
    whole, slices = split_tiles(tiles, cdiv(k, block_k), tile, num_sms(x.device))
    if tile.max_slices > 1:
        partial = torch.empty((tiles - whole, tile.block_m, slices, tile.block_n), dtype=torch.float32, device=x.device)
        finished = finished_counters(x.device)
    large_gemm_kernel[(min(num_sms(x.device), whole + (tiles - whole) * slices),)](
        _descriptor(x, tile.block_m if consumers == 2 else _CONSUMER_ROWS, block_k),
        _descriptor(weight.flatten(0, -2), half, block_k),
        _descriptor(out, _CONSUMER_ROWS // (2 if digits else 1), half // 2),
        x_scale,
        weight_scale,
        bias,
        residual,
        partial,
        finished,
        offsets,
        None if offsets is None else out,
        m,
        n,
        k,
        whole,
        slices,
        TILE=tile._replace(max_slices=min(tile.max_slices, 2)),  # the kernel depends on whether there are slices only
        GATE=gate,
        EXPERTS=experts,
        num_warps=4,
        maxnreg=_REGISTERS[consumers],
        **pdl_launch_options(x),
    )
    return out


@cache
def finished_counters(device: torch.device) -> Tensor:
    """Counters of finished slices, int32 [tile, consumer]: zero after every launch. The launches of a device run one after another."""
    return torch.zeros((MAX_SPLIT_TILES, max(_REGISTERS)), dtype=torch.int32, device=device)


def _has_descriptor(x: Tensor) -> bool:
    """Whether TMA can copy x: rows are dense, and begin at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of x for copies of `rows` rows and `columns` columns. It is a kernel argument, so a graph captures it."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], _layout(rows, columns, x.dtype))


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory of a tile of `rows` × `columns`. Triton needs 5 µs to make one."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[dtype])
