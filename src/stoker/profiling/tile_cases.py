"""Random operands, candidate tiles and launches for one row of a tuning table, which `stoker tune` times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.gemm.quantized.launch import quantized_activation_linear
from stoker.kernels.triton.gemm.skinny.launch import CHUNK_BYTES, skinny_linear
from stoker.kernels.tuning.table import TileKey
from stoker.kernels.tuning.tiles import TILE_OPS, QuantTile, SkinnyTile, Tile
from stoker.kernels.types import Fusion
from stoker.profiling.tile_tuning import LinearCase, candidates, time_linear

MIN_CTAS, MAX_CTAS = 100, 1200  # fewer leave SMs idle; more read the activations too often
MAX_SHARED_BYTES = 200_000

# (op, dtype) → form of the quantized activations or of the weight
ONE_BYTE_FORMS = {
    ("quantized_linear", "fp8"): "fp8",
    ("quantized_linear", "int8"): "digits",
    ("quantized_linear", "w8a8"): "int8",
    ("skinny_linear", "int8"): "int8",
    ("skinny_linear", "fp8"): "fp8",
}


def is_measurable(key: TileKey) -> bool:
    """Whether tiles for this op and dtype can be timed alone. Others are not tuned: the device's table applies."""
    return key[0] == "dense_linear" or key[:2] in ONE_BYTE_FORMS


def candidate_tiles(key: TileKey) -> list[Tile]:
    """The tiles that are timed for a row of the table. Each is valid, fits into shared memory, and gives the device enough CTAs."""
    op, _, shape = key
    names = dict(zip(TILE_OPS[op].shape, shape, strict=True))
    found: Iterator[Tile]
    if op == "dense_linear":
        found = candidates(LinearCase(shape[0], shape[1], shape[2], bool(shape[3])))
    elif op == "quantized_linear":
        found = _quant_tiles(*shape)
    else:
        found = _skinny_tiles(*shape)
    return [tile for tile in found if TILE_OPS[op].conflict(names, tile) is None]


def time_tiles(key: TileKey, tiles: list[Tile]) -> dict[Tile, float]:
    """The time in µs of one launch with each tile on the current GPU, in bfloat16. Tiles that fail to compile or launch are left out."""
    times: dict[Tile, float] = {}
    for tile in tiles:
        try:
            times[tile] = _time(key, tile)
        except (RuntimeError, AssertionError, ValueError) as problem:  # Triton's errors of too large tiles are RuntimeErrors, too
            if "CUDA error" in str(problem):  # the device can no longer be used
                raise
    return times


def _quant_tiles(rows: int, n: int, k: int, gated: int) -> Iterator[QuantTile]:
    """Candidate tiles of a quantized linear."""
    lines = 2 if gated else 1
    for block_n, block_k, splits, stages in itertools.product((64, 128), (128, 256, 512), (1, 2, 4), (4, 6)):
        ctas = -(-n // block_n) * splits
        fits = stages * block_k * (block_n * lines + max(rows, 8)) <= MAX_SHARED_BYTES
        if fits and k % (block_k * splits) == 0 and k // (block_k * splits) >= 4 and MIN_CTAS <= ctas <= MAX_CTAS:
            for encode in (True, False) if rows == 1 else (False,):
                yield QuantTile(block_n, block_k, splits, 8 if block_n == 128 else 4, stages, 8, encode)


def _skinny_tiles(token_tiles: int, n: int, chunks: int, gated: int) -> Iterator[SkinnyTile]:
    """Candidate tiles of the skinny GEMM."""
    for m_tiles, warps, splits, stages in itertools.product((1, 2, 4), (4, 8), (1, 2, 4), (1, 2, 4)):
        ctas = -(-n // (16 * m_tiles // (2 if gated else 1))) * splits
        if m_tiles * stages <= 8 and -(-chunks // (warps * splits)) >= stages and ctas >= MIN_CTAS:
            yield SkinnyTile(m_tiles, splits, warps, stages)


def _time(key: TileKey, tile: Tile) -> float:
    """The time in µs of one launch with a tile."""
    from stoker.profiling.tile_tuning import time_graph

    op, dtype, shape = key
    if op == "dense_linear":
        case = LinearCase(shape[0], shape[1], shape[2], bool(shape[3]))
        return time_linear(case, [tile])[tile]  # type: ignore[list-item, index]
    launch, weights = _one_byte_launch(op, dtype, shape, tile)
    return time_graph(lambda: [launch(weight) for weight in weights]) / len(weights)


def _one_byte_launch(
    op: str, dtype: str, shape: tuple[int, ...], tile: Tile
) -> tuple[Callable[[PackedWeight], Tensor], list[PackedWeight]]:
    """(a function that launches the kernel with one weight, several weights that together exceed the L2 cache)."""
    form = ONE_BYTE_FORMS[op, dtype]
    rows, n, k, gated = shape
    if op == "skinny_linear":
        rows, k = 8 * rows // (2 if dtype == "int8" else 1), CHUNK_BYTES * k
    lines = n * (2 if gated else 1)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    values = torch.float8_e4m3fn if dtype == "fp8" else torch.int8
    weights = [
        PackedWeight(
            "fp8" if dtype == "fp8" else "int8",
            torch.randint(-100, 100, (lines, k), device="cuda").to(values),
            torch.rand(lines, device="cuda"),
        )
        for _ in range(max(2, (256 << 20) // (lines * k) + 1))
    ]
    fusion = Fusion(gate="silu" if gated else None)
    if isinstance(tile, QuantTile):
        return lambda weight: quantized_activation_linear(x, weight, form, dtype, fusion, tile), weights
    assert isinstance(tile, SkinnyTile)
    return lambda weight: skinny_linear(x, weight, fusion, tile), weights
