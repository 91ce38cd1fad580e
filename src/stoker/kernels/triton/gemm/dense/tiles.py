"""Chooses the tile of a small dense linear: the measured tile of its shape, or a safe one by rule."""

from __future__ import annotations

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.tuning.tiles import LinearTile

MAX_ROWS = 64  # rows of activations; more are computed by the library's GEMM


def padded_rows(rows: int) -> int:
    """1 for one row (a GEMV without matrix instructions), else the smallest tile height (16, 32, 64 …) of at least `rows`."""
    return 1 if rows == 1 else max(16, next_power_of_2(rows))


def linear_tile(rows: int, n: int, k: int, gated: bool, itemsize: int, num_sms: int, tuning: TuningTable) -> LinearTile:
    """The tile for `rows` rows (a result of `padded_rows`) and a weight [n, k], or [2 × n, k] if gated.

    `itemsize` is the size of an element in bytes.
    """
    measured: LinearTile | None = tuning.tile("dense_linear", "16-bit", rows, n, k, gated) if itemsize == 2 else None
    if measured is not None:
        return measured
    if rows == 1:
        # At least two CTAs per SM, each with long contiguous reads.
        block_n = 8
        while block_n > 1 and n // block_n < 2 * num_sms:
            block_n //= 2
        return LinearTile(block_n // 2 if gated and block_n > 1 else block_n, min(1024, next_power_of_2(k)), 1, 4, 2)
    # Measured in decode steps of Llama-3.1-8B with 64 rows and two or four tensor-parallel ranks, H200: 3.96 and 2.73 ms per step. Smaller
    # tiles, more splits and a fused norm took 7.28 and 4.38 ms.
    block_n = 32 if itemsize > 2 else 64
    block_k = 32 if itemsize > 2 else 128 if k % 128 == 0 else 64
    num_tiles = cdiv(n, block_n)
    splits = 1
    while num_tiles * splits < 0.9 * num_sms and k // (block_k * splits * 2) >= 4:
        splits *= 2
    num_stages = tuning.fitting_stages(4, block_k * (block_n * (2 if gated else 1) + rows) * itemsize)
    return LinearTile(block_n, block_k, splits, 4, num_stages, fuse_norm=itemsize > 2)
