"""Chooses the tile of the skinny GEMM for 1 to 8 tokens: the measured tile of its shape, or a safe one by rule."""

from __future__ import annotations

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.tuning.tiles import SkinnyTile

MAX_TOKENS = 8
# The limit for int4 in groups of 32: with 8 tokens an 8B model takes 4.55 ms per step here, and 3.63 ms with the kernel in `skinny_int4`.
MAX_TOKENS_SMALL_GROUPS = 4
MAX_COLUMN_TILES = 4  # of 8 columns each; further columns belong to other CTAs, which read the weight again


def column_tiles(tokens: int, digits: int) -> int:
    """The number of 8-column tiles of the product that a CTA computes, a power of two. A token has `digits` columns."""
    return min(next_power_of_2(cdiv(tokens * digits, 8)), MAX_COLUMN_TILES)


def skinny_tile(form: str, tokens: int, n: int, num_chunks: int, gated: bool, num_sms: int, tuning: TuningTable) -> SkinnyTile:
    """The tile for a weight of n rows (2 × n when gated), each of `num_chunks` chunks of 64 bytes. `form`: int4, int8 or fp8."""
    columns = column_tiles(tokens, 1 if form == "fp8" else 2)
    measured: SkinnyTile | None = tuning.tile("skinny_linear", form, columns, n, num_chunks, gated)
    if measured is not None:
        return measured
    rows = 32
    if form == "int4" and not gated:
        rows = 16
    warps = 8 if num_chunks >= 32 and not gated else 4
    num_ctas, splits = cdiv(n, rows), 1
    while 2 * num_ctas * splits <= num_sms and num_chunks // (warps * splits * 2) >= 2:
        splits *= 2
    is_one_wave = num_ctas * splits <= 4 * num_sms  # then each warp loads all of its chunks at once
    return SkinnyTile(rows // 16, splits, warps, 1 if gated or not is_one_wave else 2 if form == "int4" else 4)
