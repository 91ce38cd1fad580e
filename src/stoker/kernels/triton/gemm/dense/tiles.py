"""Which tile a small linear uses: measured choices for known shapes, a rule for the rest.

The table is filled by `stoker.profiling.tile_tuning` on a device; an engine carries its own in tuning.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

MAX_ROWS = 64  # more rows than this belong to the library's GEMM


@dataclass(frozen=True, slots=True)
class LinearTile:
    """One program's share of the weights, and how Triton compiles it."""

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    fuse_norm: bool = True  # else a norm has a launch of its own: many rows are cheaper to scale once than in every program


# (rows padded to a tile, out_features of one part, in_features, gated) → tile.
# Measured on one H200 (benchmarks/kernels_linear.py; benchmarks/step_tiles.py for 16 and for 64 rows).
TUNED: dict[tuple[int, int, int, bool], LinearTile] = {
    (1, 6144, 4096, False): LinearTile(8, 512, 1, 4, 1),
    (16, 6144, 4096, False): LinearTile(64, 128, 2, 4, 4, False),
    (32, 6144, 4096, False): LinearTile(64, 128, 2, 4, 4, False),
    (64, 6144, 4096, False): LinearTile(64, 128, 2, 4, 3, False),
    (1, 4096, 4096, False): LinearTile(8, 1024, 1, 4, 3),
    (16, 4096, 4096, False): LinearTile(64, 256, 2, 4, 4),
    (32, 4096, 4096, False): LinearTile(64, 128, 2, 4, 6),
    (64, 4096, 4096, False): LinearTile(64, 128, 2, 4, 4),
    (1, 14336, 4096, True): LinearTile(4, 1024, 1, 4, 1),
    (16, 14336, 4096, True): LinearTile(64, 128, 1, 4, 3, False),
    (32, 14336, 4096, True): LinearTile(64, 128, 1, 4, 4, False),
    (64, 14336, 4096, True): LinearTile(64, 64, 1, 4, 3, False),
    (1, 4096, 14336, False): LinearTile(1, 1024, 1, 4, 3),
    (16, 4096, 14336, False): LinearTile(64, 256, 2, 4, 4),
    (32, 4096, 14336, False): LinearTile(64, 128, 2, 4, 6),
    (64, 4096, 14336, False): LinearTile(64, 128, 2, 4, 6),
    (1, 128256, 4096, False): LinearTile(4, 1024, 1, 4, 3),
    (16, 128256, 4096, False): LinearTile(128, 128, 1, 8, 4, False),
    (32, 128256, 4096, False): LinearTile(128, 128, 1, 8, 4, False),
    (64, 128256, 4096, False): LinearTile(128, 128, 1, 8, 4, False),
}


def padded_rows(rows: int) -> int:
    """1 for one row (no matrix instruction), else the matrix tile's side: 16, 32 or 64."""
    return 1 if rows == 1 else max(16, triton.next_power_of_2(rows))


def linear_tile(rows: int, n: int, k: int, gated: bool, itemsize: int, num_sms: int) -> LinearTile:
    """The tile for `rows` (as `padded_rows` gives it) of x and a weight [n (twice when gated), k] of `itemsize` bytes an element."""
    key = (rows, n, k, gated)
    if key in TUNED and itemsize == 2:
        return TUNED[key]
    if rows == 1:
        # Enough programs for two a multiprocessor, each with long contiguous reads.
        block_n = 8
        while block_n > 1 and n // block_n < 2 * num_sms:
            block_n //= 2
        return LinearTile(block_n // 2 if gated and block_n > 1 else block_n, min(1024, triton.next_power_of_2(k)), 1, 4, 2)
    # 64 rows of what one of two and of four ranks has of Llama-3.1-8B: 3.96 and 2.73 ms a step, tile by tile tuned. With smaller tiles,
    # more splits and the norm inside they were 7.28 and 4.38.
    block_n = 32 if itemsize > 2 else 64
    block_k = 32 if itemsize > 2 else 128 if k % 128 == 0 else 64
    programs = triton.cdiv(n, block_n)
    splits = 1
    while programs * splits < 0.9 * num_sms and k // (block_k * splits * 2) >= 4:
        splits *= 2
    return LinearTile(block_n, block_k, splits, 4, 4, fuse_norm=itemsize > 2)
