"""Which tile streams a weight: measured choices for known shapes, a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import triton

MOST_TOKENS = 8  # rows of x up to which a weight is streamed
MOST_OF_SMALL_GROUPS = 4  # the same of int4 whose pairs of groups share a chunk: 8 rows take an 8B model 4.55 ms a step, 16 in bands 3.63
MOST_TOKEN_TILES = 4  # of 8 columns each; more are other programs', that read the weight again


@dataclass(frozen=True, slots=True)
class StreamTile:
    """One program's share of the weight."""

    m_tiles: int = 2  # of 16 rows; of a gated weight half are gates
    splits: int = 1  # programs that share the features
    num_warps: int = 8
    num_stages: int = 2  # chunks that a warp has asked for before it multiplies one


# (form, tiles of 8 columns of tokens, rows of a part, chunks of a row, gated) → tile.
# Measured on one H200 for Llama-3.1-8B's shapes (benchmarks/kernels_stream.py), and where the rule does worse for those that one, two and
# four ranks have of the 70B's, in a step (benchmarks/step_tiles.py).
TUNED: dict[tuple[str, int, int, int, bool], StreamTile] = {
    ("int4", 1, 6144, 16, False): StreamTile(1, 1, 4, 2),
    ("int4", 1, 4096, 16, False): StreamTile(1, 1, 4, 2),
    ("int4", 1, 14336, 16, True): StreamTile(2, 1, 8, 1),
    ("int4", 1, 4096, 56, False): StreamTile(1, 1, 8, 2),
    ("int4", 1, 128256, 16, False): StreamTile(1, 1, 4, 1),
    ("int4", 1, 6144, 32, False): StreamTile(1, 1, 4, 2),
    ("int4", 2, 6144, 16, False): StreamTile(1, 1, 4, 2),
    ("int4", 2, 4096, 16, False): StreamTile(1, 1, 4, 4),
    ("int4", 2, 14336, 16, True): StreamTile(2, 1, 4, 1),
    ("int4", 2, 4096, 56, False): StreamTile(1, 1, 4, 4),
    ("int4", 2, 128256, 16, False): StreamTile(1, 1, 4, 1),
    ("bytes", 1, 6144, 64, False): StreamTile(1, 1, 8, 2),
    ("bytes", 1, 4096, 64, False): StreamTile(2, 1, 8, 4),
    ("bytes", 1, 14336, 64, True): StreamTile(2, 1, 4, 1),
    ("bytes", 1, 4096, 224, False): StreamTile(2, 1, 8, 4),
    ("bytes", 1, 128256, 64, False): StreamTile(1, 1, 4, 2),
    ("bytes", 2, 6144, 64, False): StreamTile(2, 2, 8, 1),
    ("bytes", 2, 4096, 64, False): StreamTile(2, 1, 8, 4),
    ("bytes", 2, 14336, 64, True): StreamTile(2, 1, 4, 1),
    ("bytes", 2, 4096, 224, False): StreamTile(4, 4, 4, 2),
    ("bytes", 2, 128256, 64, False): StreamTile(4, 1, 4, 1),
    ("fp8", 1, 6144, 64, False): StreamTile(1, 1, 8, 1),
    ("fp8", 1, 4096, 64, False): StreamTile(2, 1, 8, 4),
    ("fp8", 1, 14336, 64, True): StreamTile(2, 1, 4, 1),
    ("fp8", 1, 4096, 224, False): StreamTile(2, 4, 8, 1),
    ("fp8", 1, 128256, 64, False): StreamTile(2, 1, 8, 4),
    ("fp8", 1, 10240, 128, False): StreamTile(1, 1, 8, 1),
    ("fp8", 1, 8192, 128, False): StreamTile(2, 1, 8, 2),
    ("fp8", 1, 5120, 128, False): StreamTile(1, 2, 8, 1),
    ("fp8", 1, 8192, 64, False): StreamTile(1, 1, 8, 1),
    ("fp8", 1, 2560, 128, False): StreamTile(1, 4, 8, 1),
    ("fp8", 1, 8192, 32, False): StreamTile(2, 1, 8, 1),
    ("fp8", 1, 7168, 128, True): StreamTile(2, 1, 8, 1),
    ("fp8", 1, 8192, 112, False): StreamTile(1, 1, 8, 1),
}


def token_tiles(tokens: int, digits: int) -> int:
    """Tiles of 8 columns that a program has: a power of two."""
    return min(triton.next_power_of_2(triton.cdiv(tokens * digits, 8)), MOST_TOKEN_TILES)


def stream_tile(form: str, tokens: int, n: int, chunks: int, gated: bool, num_sms: int) -> StreamTile:
    """The tile for a weight of n rows (twice when gated) of `chunks` × 64 bytes."""
    tiles = token_tiles(tokens, 2 if form in ("int4", "bytes") else 1)
    tuned = TUNED.get((form, tiles, n, chunks, gated))
    if tuned is not None:
        return tuned
    rows = 32
    if form == "int4" and not gated:
        rows = 16
    warps = 8 if chunks >= 32 and not gated else 4
    programs, splits = triton.cdiv(n, rows), 1
    while 2 * programs * splits <= num_sms and chunks // (warps * splits * 2) >= 2:
        splits *= 2
    few = programs * splits <= 4 * num_sms  # then each warp's chunks are all asked for at once
    return StreamTile(rows // 16, splits, warps, 1 if gated or not few else 2 if form == "int4" else 4)
