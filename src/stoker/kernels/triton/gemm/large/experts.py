"""The grouped form of the GEMM for many rows: rows that are sorted by expert, each expert with a weight of its own.

    x         [m, k]                    rows sorted by expert: those from offsets[e] to offsets[e + 1] belong to expert e
    weight    [experts × n, k]          the weight of expert e begins at row e × n, or e × 2 × n if gated
    offsets   int32 [experts + 1]       known on the device only; from 0 to m

    tiles     | expert 0: ceil(rows ÷ block_m) × n tiles | expert 1 | expert 2: no rows, no tile | expert 3 | ...
              0                                          first

The tiles of an expert are ordered like those of a product of its own (`tile_origin`): the last tile of rows ends with the expert's last
row, if there are as many as in a tile. An expert with fewer rows has one tile of rows, which loads rows of the next experts, too, and
stores its own rows only. Rows do not depend on each other, so that a row has the same bits in each tile.

The units of a CTA ascend, so that each partition of warps walks over the experts once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def count_row_tiles(m, offsets_ptr, TILE: gl.constexpr, EXPERTS: gl.constexpr):
    """The number of tiles of rows of m rows, or of those of all experts."""
    if EXPERTS == 0:
        return gl.cdiv(m, TILE.block_m)
    else:
        tiles = 0
        begin = gl.load(offsets_ptr)
        for expert in range(EXPERTS):
            end = gl.load(offsets_ptr + expert + 1)
            tiles += gl.cdiv(end - begin, TILE.block_m)
            begin = end
        return tiles


@gluon.jit
def first_expert(m, offsets_ptr, EXPERTS: gl.constexpr):
    """(expert 0, its first tile 0, its first row, the end of its rows). Without experts, it has all m rows."""
    if EXPERTS == 0:
        return 0, 0, 0, m
    else:
        return 0, 0, gl.load(offsets_ptr), gl.load(offsets_ptr + 1)


@gluon.jit
def find_expert(tile, expert, first, begin, end, n_tiles, offsets_ptr, TILE: gl.constexpr, EXPERTS: gl.constexpr):
    """(expert, first tile, first row, end of the rows) of the expert of `tile`, from those of an expert that is not after it."""
    if EXPERTS > 0:
        past = first + gl.cdiv(end - begin, TILE.block_m) * n_tiles
        while tile >= past:
            expert += 1
            first = past
            begin = end
            end = gl.load(offsets_ptr + expert + 1)
            past = first + gl.cdiv(end - begin, TILE.block_m) * n_tiles
    return expert, first, begin, end
