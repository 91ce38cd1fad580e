"""Which bands int4 is cut into for some tokens: measured choices for known shapes, a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import triton

MOST_TOKENS = 64  # rows of x


@dataclass(frozen=True, slots=True)
class BandTile:
    """One program's share of the weight."""

    m_tiles: int = 2  # of 16 rows, that a warp has; of a gated weight half are gates
    splits: int = 1  # programs that share the features
    num_warps: int = 4
    num_stages: int = 1  # chunks that a warp has asked for besides the one that it multiplies


# (group, tiles of tokens, rows of a part, chunks of a row, gated) → tile.
TUNED: dict[tuple[int, int, int, int, bool], BandTile] = {}


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens: a power of two."""
    return triton.next_power_of_2(triton.cdiv(tokens, 8))


def band_tile(group: int, tokens: int, n: int, chunks: int, gated: bool, multiprocessors: int) -> BandTile:
    """The tile for a weight of n rows (twice when gated) of `chunks` chunks."""
    tuned = TUNED.get((group, token_tiles(tokens), n, chunks, gated))
    if tuned is not None:
        return tuned
    programs, splits = triton.cdiv(n, 128 // (2 if gated else 1)), 1
    while programs * splits * 2 <= 2 * multiprocessors and chunks // (splits * 2) >= 3:
        splits *= 2
    return BandTile(splits=splits)
