"""Chooses the tile of the int4 skinny GEMM for 1 to 64 tokens: the measured tile of its shape, or a safe one by rule."""

from __future__ import annotations

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.tuning.tiles import SkinnyInt4Tile

MAX_TOKENS = 64
MAX_GROUP = 64  # so that a pair of groups fits into a chunk of 64 bytes


def token_tiles(tokens: int) -> int:
    """The number of tiles of 8 tokens, rounded up to a power of two."""
    return next_power_of_2(cdiv(tokens, 8))


def skinny_int4_tile(group: int, tokens: int, n: int, num_chunks: int, gated: bool, num_sms: int, tuning: TuningTable) -> SkinnyInt4Tile:
    """The tile for a weight of n rows (2 × n when gated), each of `num_chunks` chunks of 64 bytes, with groups of `group` features."""
    measured: SkinnyInt4Tile | None = tuning.tile("skinny_int4_linear", "int4", group, token_tiles(tokens), n, num_chunks, gated)
    if measured is not None:
        return measured
    m_tiles, splits = cdiv(n, 16), 1
    while m_tiles * splits < 6 * num_sms and num_chunks // (splits * 2) >= 4:
        splits *= 2
    return SkinnyInt4Tile(2 if gated else 1, splits, 2, 2 if tokens <= 32 and not gated else 1)
