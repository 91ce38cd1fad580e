"""The tiles of the GEMM for many rows, and which of them is faster than other kernels.

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

16 bits with 33 to 1,023 rows, µs in bfloat16 with the norm before q, k, v and gate, up, `gemm.dense` up to 64 rows or the library with
separate kernels → here, on an H200 (benchmarks/results/h200_medium_gemm_bf16.json). Without numbers: the other kernels, which are faster:

    | rows | 8B: q, k, v | out         | gate, up      | down          | 70B, a half: gate, up | gpt-oss-20b: out |
    | 64   | 19.9 → 18.5 |             | 64.8 → 63.2   |               | 119.7 → 119.5         |                  |
    | 128  |             |             | 74.1 → 70.3   |               | 134.6 → 131.2         |                  |
    | 256  |             |             | 98.9 → 94.4   |               | 193.5 → 188.1         |                  |
    | 448  |             | 27.8 → 26.8 | 293.0 → 171.9 | 78.0 → 79.3   | 572.2 → 335.0         | 34.6 → 24.5      |
    | 512  |             | 28.5 → 27.2 | 171.4 → 171.4 | 80.2 → 79.8   |                       |                  |
    | 640  |             |             | 248.3 → 230.2 |               |                       |                  |
    | 768  |             | 40.2 → 37.8 | 307.9 → 286.8 | 119.2 → 118.7 | 601.7 → 552.0         |                  |
    | 896  |             | 49.5 → 45.9 | 345.5 → 310.8 | 157.8 → 154.8 |                       |                  |
    | 1000 |             | 50.7 → 47.5 | 375.1 → 350.0 | 163.9 → 161.3 |                       | 47.5 → 46.0      |
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from stoker.kernels.triton.integers import cdiv


class LargeGemmTile(NamedTuple):
    """The output tile of a CTA, the depth of its pipeline, the order of tiles, and how many CTAs may share a tile of the last round."""

    block_m: int  # rows of x
    block_n: int  # rows of the weight
    num_stages: int
    group_m: int  # tiles of rows that share a tile of the weight in L2
    max_slices: int = 1  # of the features of a tile of the last round; more than 1 with split-K


SMALL_TILE = LargeGemmTile(64, 128, 8, 16)
SMALL_GATED_TILE = LargeGemmTile(64, 256, 5, 16)
NARROW_TILE = LargeGemmTile(128, 128, 6, 16)
SPLIT_TILE = LargeGemmTile(128, 128, 6, 16, max_slices=2)
TALL_TILE = LargeGemmTile(192, 128, 5, 16)  # with three consumers
TILE = LargeGemmTile(128, 256, 4, 16)
DIVIDED_TILE = LargeGemmTile(128, 256, 4, 16, max_slices=8)
BLOCK_BYTES = 128  # of the features of a row in a stage
MAX_SPLIT_TILES = 128  # of a launch with split-K: half as many as SMs, or more
MIN_ROWS = 1024  # from which TILE is the only tile
MIN_OCCUPANCY = 0.85  # of these rows: the library has other tiles, with which the last round leaves fewer SMs idle
MEDIUM_ROWS = range(65, MIN_ROWS)  # with tiles of `medium_tile` (FP8) or `sixteen_bit_tile`
# The time of a round of each tile, as a part of that of TILE. NARROW_TILE: 0.51 to 0.67. TALL_TILE: 0.79 to 0.88.
ROUNDS = {NARROW_TILE: 0.55, TALL_TILE: 0.86, TILE: 1.0}
MAX_GATED_ROUNDS, MAX_ROUNDS = 3, 1  # of FP8, of TILE or their time: with four rounds, the library is up to 5 % faster than gated tiles
MIN_SPLIT_FEATURES = 8192  # of FP8; with 4096, two slices take up to a fifth longer than one
MIN_SIXTEEN_BIT_ROWS = 33  # fewer were not measured
SMALL_OUTPUTS = range(5120, 6145)  # of SMALL_TILE: with 4096 and 8192, the GEMM for few rows is faster
LIBRARY_GATED_ROWS = range(257, 385)  # of 16 bits: the library and a kernel for the gate take 2 to 4 % less than three rounds of TILE
MIN_USE, MIN_GATED_USE = 0.84, 0.8  # of all SMs, of 16 bits with a residual and with a gate; with less, the library is faster
MIN_BIASED_USE = 0.55  # with a bias and a residual, of which the library's epilogue adds only one
# Of the slices of DIVIDED_TILE in `tile_time`, constant and per slice: 7 µs for two slices, 10 for four, 13 for eight.
SLICES_TIME, SLICE_TIME = 450, 90


def count_tiles(m: int, n: int, tile: LargeGemmTile, gate: str | None) -> int:
    """The number of tiles of an output [m, n]."""
    return cdiv(m, tile.block_m) * cdiv(n, tile.block_n // (2 if gate else 1))


def split_tiles(tiles: int, blocks: int, tile: LargeGemmTile, num_sms: int) -> tuple[int, int]:
    """(the number of tiles that one CTA computes, the number of slices of each later one), for `blocks` blocks of features."""
    last = tiles % num_sms
    slices = min(tile.max_slices, blocks, num_sms // last) if 0 < last <= MAX_SPLIT_TILES else 1
    return (tiles, 1) if slices == 1 else (tiles - last, slices)


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


def sixteen_bit_tile(m: int, n: int, k: int, gate: str | None, is_added: bool, is_biased: bool, num_sms: int) -> LargeGemmTile | None:
    """The tile for an output [m, n] of less than MIN_ROWS rows and k features of 16 bits, or None where other kernels are faster.

    `is_added`: a residual is added. With up to 64 rows, gates, and outputs for which tiles of the GEMM for few rows fit the SMs badly. With
    more, the library is faster unless a gate or a residual is saved and the SMs are used well: CTAs of the library share operands by
    multicast, which Gluon of Triton 3.6 lacks.
    """
    if m < MIN_SIXTEEN_BIT_ROWS:
        return None
    if not gate and not is_added:
        return SMALL_TILE if m <= SMALL_TILE.block_m and n in SMALL_OUTPUTS else None
    if m <= SMALL_TILE.block_m:
        tiles = (SMALL_GATED_TILE,) if gate else ()
    elif gate:
        tiles = () if m in LIBRARY_GATED_ROWS else (TILE, DIVIDED_TILE)
    else:
        tiles = (NARROW_TILE, TALL_TILE, TILE)
    least = MIN_GATED_USE if gate else MIN_BIASED_USE if is_biased and m > 256 else MIN_USE
    times = {tile: tile_time(m, n, k, tile, gate, num_sms) for tile in tiles}
    tile = min(times, key=times.__getitem__, default=None)
    if tile is None:
        return None
    rounds = max(m, SMALL_TILE.block_m) * n * (2 if gate else 1) / (tile.block_m * tile.block_n * num_sms)  # if no SM were idle
    return tile if rounds * _round_time(tile) * k / times[tile] >= least else None


@cache
def sixteen_bit_tiles(n: int, k: int, gate: str | None, is_added: bool, is_biased: bool, num_sms: int) -> tuple[LargeGemmTile, ...]:
    """The tiles of `sixteen_bit_tile` for any number of rows in MEDIUM_ROWS."""
    found = {sixteen_bit_tile(m, n, k, gate, is_added, is_biased, num_sms) for m in MEDIUM_ROWS}
    return tuple(sorted(tile for tile in found if tile is not None))


def tile_time(m: int, n: int, k: int, tile: LargeGemmTile, gate: str | None, num_sms: int) -> float:
    """The estimated time of an output [m, n] of k features of 16 bits. The unit is that of one feature in a round of TILE, 11 ns."""
    tiles = count_tiles(m, n, tile, gate)
    whole, slices = split_tiles(tiles, cdiv(k, BLOCK_BYTES // 2), tile, num_sms)
    rounds = cdiv(whole, num_sms) + (1 / slices if tiles > whole else 0)
    return _round_time(tile) * rounds * k + (SLICES_TIME + SLICE_TIME * slices if slices > 1 else 0)


def _round_time(tile: LargeGemmTile) -> float:
    """The time of a round of `tile` as a part of that of TILE. 1 for tiles of few rows, which are compared with no other tile."""
    return ROUNDS.get(tile._replace(max_slices=1), 1.0)
