"""Which bands int4 is cut into for some tokens: measured choices for known shapes, a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import triton

MOST_TOKENS = 64  # rows of x
LARGEST_GROUP = 64  # a pair fits a chunk


@dataclass(frozen=True, slots=True)
class BandTile:
    """One program's share of the weight."""

    m_tiles: int = 2  # of 16 rows, that a warp has; of a gated weight half are gates
    splits: int = 1  # programs that share the features
    num_warps: int = 4
    num_stages: int = 1  # chunks that a warp has asked for besides the one that it multiplies


# (group, tiles of tokens, rows of a part, chunks of 64 bytes of a row, gated) → tile.
# Measured on one H200 for Llama-3.1-8B's shapes (benchmarks/kernels_stream.py).
TUNED: dict[tuple[int, int, int, int, bool], BandTile] = {
    (32, 2, 6144, 32, False): BandTile(1, 4, 2, 2),
    (32, 2, 4096, 32, False): BandTile(1, 8, 4, 2),
    (32, 2, 14336, 32, True): BandTile(2, 1, 2, 2),
    (32, 2, 4096, 112, False): BandTile(1, 8, 4, 2),
    (32, 4, 6144, 32, False): BandTile(1, 4, 2, 1),
    (32, 4, 4096, 32, False): BandTile(1, 4, 2, 2),
    (32, 4, 14336, 32, True): BandTile(2, 1, 2, 1),
    (32, 4, 4096, 112, False): BandTile(1, 6, 2, 2),
    (32, 8, 6144, 32, False): BandTile(1, 4, 2, 1),
    (32, 8, 4096, 32, False): BandTile(1, 6, 2, 2),
    (32, 8, 14336, 32, True): BandTile(2, 1, 2, 1),
    (32, 8, 4096, 112, False): BandTile(2, 8, 2, 2),
}


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens: a power of two."""
    return triton.next_power_of_2(triton.cdiv(tokens, 8))


def band_tile(group: int, tokens: int, n: int, chunks: int, gated: bool, num_sms: int) -> BandTile:
    """The tile for a weight of n rows (twice when gated) of `chunks` chunks."""
    tuned = TUNED.get((group, token_tiles(tokens), n, chunks, gated))
    if tuned is not None:
        return tuned
    bands, splits = triton.cdiv(n, 16), 1
    while bands * splits < 6 * num_sms and chunks // (splits * 2) >= 4:
        splits *= 2
    return BandTile(2 if gated else 1, splits, 2, 2 if tokens <= 32 and not gated else 1)
