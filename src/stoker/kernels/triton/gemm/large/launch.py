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

FP8 with 65 to 1,023 rows, µs with the quantization of rows, library → here, on an H200 (benchmarks/results/h200_medium_gemm.json). Without
numbers: other kernels, which are faster. In parentheses: the library is used. Ranks of 70B add no residual:

    | rows | 8B: q, k, v | out         | gate, up    | down        | 70B, a half: q, k, v | out         | gate, up      | down        |
    | 128  |             |             | 44.8 → 44.0 |             |                      | 18.7 → 16.9 | 75.9 → 76.7   | 45.2 → 42.9 |
    | 256  | 20.6 → 18.5 | 20.3 → 17.3 | 64.0 → 59.2 | 46.3 → 36.8 | 29.8 → 28.8          | 19.9 → 19.1 | 112.4 → 110.0 | 50.5 → 51.2 |
    | 384  | 30.7 → 29.6 | 22.2 → 19.0 | 88.0 → 85.4 | 50.7 → 48.0 | 31.5 → 30.8          | 30.1 → 30.2 | 158.0 → 155.7 | 85.4 → 83.6 |
    | 512  | 31.7 → 31.7 | 23.7 → 19.7 | (106, 111)  | 54.7 → 53.4 | 50.4 → 49.3          | 31.6 → 31.7 | (192, 201)    | 93.4 → 94.5 |

More rows, and q, k and v of 257 to 384 with TALL_TILE, on another H200 (h200_decode_products.json), 8B:

    | rows | q, k, v     | out         | down        |
    | 384  | 27.9 → 24.1 |             |             |
    | 520  | 29.0 → 29.9 | 31.1 → 25.9 | 84.5 → 66.1 |
    | 640  | 29.2 → 29.8 | 32.1 → 26.7 | 87.3 → 73.1 |
    | 768  | (41.4)      | 33.4 → 27.4 | 91.6 → 75.1 |
    | 896  | (43.6)      | 34.8 → 32.7 | 94.2 → 91.5 |
    | 1000 | (44.6)      | 36.1 → 33.9 | 98.5 → 96.5 |
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.large.kernel import CONSUMER_ROWS, large_gemm_kernel
from stoker.kernels.triton.integers import cdiv
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.types import Fusion


class LargeGemmTile(NamedTuple):
    """The output tile of a CTA, the depth of its pipeline, the order of tiles, and whether two CTAs share a tile."""

    block_m: int  # rows of x
    block_n: int  # rows of the weight
    num_stages: int
    group_m: int  # tiles of rows that share a tile of the weight in L2
    slices: int = 1  # of the features: 1, or 2 with split-K


class Digits(NamedTuple):
    """What rows of int8 digits do not say about the 16-bit rows that they are."""

    rows: int
    dtype: torch.dtype


TILE = LargeGemmTile(128, 256, 4, 16)
NARROW_TILE = LargeGemmTile(128, 128, 6, 16)
SPLIT_TILE = LargeGemmTile(128, 128, 6, 16, slices=2)
TALL_TILE = LargeGemmTile(192, 128, 5, 16)  # with three consumers
BLOCK_BYTES = 128  # of the features of a row in a stage
MIN_ROWS = 1024  # of `TILE`, apart from FP8 with MEDIUM_ROWS
MAX_ROW_BYTES = 32 << 10  # of x: with longer rows, adding the residual is too small a part of the time
MIN_OCCUPANCY = 0.85  # the library has other tiles, with which the last round leaves fewer SMs idle
MEDIUM_ROWS = range(65, 1024)  # of FP8, with tiles of `medium_tile`
# The time of a round of each tile, as a part of that of TILE. NARROW_TILE: 0.51 to 0.67. TALL_TILE: 0.79 to 0.88.
ROUNDS = {NARROW_TILE: 0.55, TALL_TILE: 0.86, TILE: 1.0}
MAX_GATED_ROUNDS, MAX_ROUNDS = 3, 1  # of TILE or their time: with four rounds, the library is up to 5 % faster than gated tiles
MIN_SPLIT_FEATURES = 8192  # with 4096, two slices take up to a fifth longer than one
MAX_SPLIT_TILES = 1024  # of a launch with split-K
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8}
DIGIT_ROWS = range(129, 2049)  # of 16-bit rows × int8 weights: fewer have other kernels, and the weight is dequantized for more
MAX_DIGIT_FEATURES = 1 << 17  # 127 × 127 times as many fit int32
_CONSUMER_ROWS = CONSUMER_ROWS.value
_REGISTERS = {2: 168, 3: 128}  # by consumers, per thread at the start: what three or four warpgroups of one CTA can have


def faster_tile(x: Tensor, weight: Tensor, fusion: Fusion) -> LargeGemmTile | None:
    """The tile with which `large_gemm` is faster than the library for x [m, k] × weight [n, k] with the gate or residual of `fusion`.

    x and weight have the same dtype: bfloat16, float16 or float8_e4m3fn. None: it is not faster, or does not support the product.
    """
    m, n = x.shape[0], weight.shape[0] // (2 if fusion.gate else 1)
    if x.dtype not in _TYPES or x.dtype != weight.dtype or n % 8 or not (_has_descriptor(x) and _has_descriptor(weight)):
        return None
    if not supports(x, "large_gemm"):
        return None
    if fusion.residual is not None and not (fusion.residual.is_contiguous() and fusion.residual.shape == (m, n)):
        return None
    if m in MEDIUM_ROWS and x.itemsize == 1:
        return medium_tile(m, n, x.shape[1], fusion.gate, num_sms(x.device))
    if fusion.gate is not None:
        has_faster_epilogue = x.itemsize == 2
    else:
        has_faster_epilogue = fusion.residual is not None and x.shape[1] * x.itemsize <= MAX_ROW_BYTES
    if m < MIN_ROWS or not has_faster_epilogue:
        return None
    # The ahead-of-time trace runs few numbers of rows, and must list the kernel if any number uses it.
    return TILE if x.is_meta or occupancy(m, n, fusion.gate, num_sms(x.device)) >= MIN_OCCUPANCY else None


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


def occupancy(m: int, n: int, gate: str | None, num_sms: int) -> float:
    """The used part of all SMs over the rounds of tiles that an output [m, n] takes."""
    tiles = count_tiles(m, n, TILE, gate)
    return tiles / (cdiv(tiles, num_sms) * num_sms)


def medium_tile(m: int, n: int, k: int, gate: str | None, num_sms: int) -> LargeGemmTile | None:
    """The tile for an output [m, n] of MEDIUM_ROWS rows and k features of FP8, or None where the library is faster.

    It is the one whose rounds take the least time, or half a tile per CTA where all halves run at the same time. What is saved is a
    constant (the start of a launch, the residual or the gate), so with many rounds the library, whose tiles are a few percent faster, wins.
    """
    if 2 * count_tiles(m, n, NARROW_TILE, gate) <= num_sms and k >= MIN_SPLIT_FEATURES:
        return SPLIT_TILE
    times = {tile: each * cdiv(count_tiles(m, n, tile, gate), num_sms) for tile, each in ROUNDS.items() if not gate or tile != TALL_TILE}
    tile = min(times, key=times.__getitem__)
    return tile if times[tile] <= (MAX_GATED_ROUNDS if gate else MAX_ROUNDS) else None


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
    Split-K is for at most MAX_SPLIT_TILES tiles, and for more than BLOCK_BYTES bytes of features.
    """
    rows, k = x.shape
    n, experts = weight.shape[-2] // (2 if gate else 1), 0 if offsets is None else len(weight)
    m, dtype = digits or (rows, torch.bfloat16 if x.itemsize == 1 else x.dtype)
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    half, block_k = tile.block_n // 2, BLOCK_BYTES // x.itemsize
    # An expert has less than one tile of rows more than its rows fill.
    tiles, consumers = count_tiles(rows + experts * (tile.block_m - 1), n, tile, gate), tile.block_m // _CONSUMER_ROWS
    partial = finished = None
    if tile.slices > 1:
        if tiles > MAX_SPLIT_TILES or k <= block_k:
            raise ValueError(f"split-K is for at most {MAX_SPLIT_TILES} tiles and more than {block_k} features, not for {tiles} and {k}")
        partial = torch.empty((tiles, 2, tile.slices, tile.block_m // 2, tile.block_n), dtype=torch.float32, device=x.device)
        finished = finished_counters(x.device)
    large_gemm_kernel[(min(num_sms(x.device), tiles * tile.slices),)](
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
        TILE=tile,
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
    return torch.zeros((MAX_SPLIT_TILES, 2), dtype=torch.int32, device=device)


def count_tiles(m: int, n: int, tile: LargeGemmTile, gate: str | None) -> int:
    """The number of tiles of an output [m, n]."""
    return cdiv(m, tile.block_m) * cdiv(n, tile.block_n // (2 if gate else 1))


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
