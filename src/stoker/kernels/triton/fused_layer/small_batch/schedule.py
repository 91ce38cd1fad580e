"""Which tiles of which weights a warp of `fused_layer_small_batch_kernel` multiplies, one after another, and how it asks for them ahead.

A program has some tiles of 16 rows of each linear, whose features its warps share. What a warp asks for goes on from linear to linear.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.linear_args import LENGTH, SCALES, STRIDE, WEIGHT, ZEROS, N, chosen, number
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, ask_blocks, ask_piece, asked, groups_of_block

# The fields of what `terms` gives, which is what asking for a linear's tiles takes.
AT_WEIGHT, AT_SCALES, AT_ZEROS, ROW_BYTES, ROW_BLOCKS, PART_ROWS, PARTS, FIRST_ROW, TILES, TURNS = map(tl.constexpr, range(10))


@triton.constexpr_function
def grid_bytes(group, zero):
    """Of a block of int4: its groups' scales of 16 rows, then their zeros, in whole lines."""
    scales = 32 * groups_of_block(group) if group else 0
    zeros = {"none": 0, "int": scales // 2, "float": scales}[zero]
    return -(-(scales + zeros) // 128) * 128


@triton.constexpr_function
def slot_bytes(group, zero, blocks):
    return blocks * (BLOCK_BYTES.value + grid_bytes(group, zero))


@gluon.jit
def share(n, programs):
    """(first tile of 16 rows, how many) of this program."""
    tiles = n // 16
    each = gl.cdiv(tiles, programs)
    first = gl.minimum(gl.program_id(0) * each, tiles)
    return first, gl.minimum(each, tiles - first)


@gluon.jit
def terms(links, linear, programs, GATES: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, SPAN: gl.constexpr):
    """(addresses of the weight, its scales and its zeros, bytes and blocks of a row, rows of a part, parts, this program's first row, tiles
    to ask for, turns of a tile). No tiles after the last linear."""
    weight = chosen(links, linear, WEIGHT, gl.int64, len(GATES))
    scale = weight
    zero = weight
    if GROUP > 0:
        scale = chosen(links, linear, SCALES, gl.int64, len(GATES))
        if ZERO != "none":
            zero = chosen(links, linear, ZEROS, gl.int64, len(GATES))
    n = chosen(links, linear, N, gl.int32, len(GATES))
    stride = chosen(links, linear, STRIDE, gl.int64, len(GATES))
    blocks = chosen(links, linear, LENGTH, gl.int32, len(GATES))
    parts = 1 + number(GATES, linear, len(GATES))
    first, mine = share(n, programs)
    tiles = gl.where(linear < len(GATES), mine * parts, 0)
    return weight, scale, zero, stride, blocks, n, parts, first * 16, tiles, gl.cdiv(blocks, SPAN)


@gluon.jit
def from_linear(links, linear, programs, GATES: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, SPAN: gl.constexpr):
    """(the first linear from that one on of which this program has tiles, and its `terms`)."""
    found = terms(links, linear, programs, GATES, GROUP, ZERO, SPAN)
    while (found[TILES] == 0) & (linear < len(GATES)):
        linear += 1
        found = terms(links, linear, programs, GATES, GROUP, ZERO, SPAN)
    return linear, found


@gluon.jit
def tile_row(tile, found):
    """A tile's first row in the weight: gates and what they gate take turns. Of one part or two: a division would be 150 cycles' wait."""
    second = found[PARTS] - 1
    return found[FIRST_ROW] + (tile >> second) * 16 + (tile & second) * found[PART_ROWS]


@gluon.jit
def lane_source(row, found, lane, warp, BLOCKS: gl.constexpr):
    """This lane's first 16 bytes of a tile."""
    piece = (warp * (128 * BLOCKS) + lane % 8 * 16).to(gl.int64)
    return found[AT_WEIGHT] + piece + (row + lane // 8).to(gl.int64) * found[ROW_BYTES]


@gluon.jit
def grid_source(row, found, lane, warp, GROUP: gl.constexpr, ZERO: gl.constexpr, BLOCKS: gl.constexpr):
    """(this lane's first 16 bytes of a tile's scales and zeros, bytes from a block to the next).

    Of a block's groups: so many lanes copy eight rows' scales each, the lanes after them zeros, of eight rows or of 16 (int).
    """
    COUNT: gl.constexpr = groups_of_block(GROUP)
    rows = (found[PART_ROWS] * found[PARTS]).to(gl.int64)
    group = warp * (COUNT * BLOCKS)
    place = found[AT_SCALES] + ((group + lane % (2 * COUNT) // 2) * rows + row + lane % 2 * 8) * 2
    step = lane.to(gl.int64) * 0 + 2 * COUNT * rows
    if ZERO == "float":
        place = gl.where(lane < 2 * COUNT, place, place - found[AT_SCALES] + found[AT_ZEROS])
    elif ZERO == "int":
        place = gl.where(lane < 2 * COUNT, place, found[AT_ZEROS] + (group + lane % COUNT) * rows + row)
        step = gl.where(lane < 2 * COUNT, step, COUNT * rows)
    return place, step


@gluon.jit
def begin(
    links, programs, lane, warp, GATES: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr
):
    """Where asking starts: (linear, tile, turn, the lane's source, that of scales and its step, the linear's terms)."""
    nothing = gl.to_tensor(0)
    linear, found = from_linear(links, nothing, programs, GATES, GROUP, ZERO, WARPS * BLOCKS)
    row = tile_row(nothing, found)
    source = lane_source(row, found, lane, warp, BLOCKS)
    return linear, nothing, nothing, source, grid_source(row, found, lane, warp, GROUP, ZERO, BLOCKS), found


@gluon.jit
def ask(
    state, links, programs, place, lane, warp,
    GATES: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Ask for the warp's blocks of the next turn, into the slot at `place`. Returns what comes after them."""
    linear, tile, turn, source, grid, found = state
    left = gl.where(tile < found[TILES], found[ROW_BLOCKS], 0) - (turn * WARPS + warp) * BLOCKS
    sizes = ()
    for block in gl.static_range(BLOCKS):
        sizes = sizes + (gl.where(left > block, 16, 0),)
    four_rows = lane.to(gl.int64) * 0 + 4 * found[ROW_BYTES]
    ask_blocks(place, source, four_rows, 2 * four_rows, sizes, lane, BLOCKS, True)
    if GROUP > 0:
        COUNT: gl.constexpr = groups_of_block(GROUP)
        LANES: gl.constexpr = 4 * COUNT if ZERO == "float" else 3 * COUNT if ZERO == "int" else 2 * COUNT
        for block in gl.static_range(BLOCKS):
            at = place + (BLOCKS * BLOCK_BYTES + grid_bytes(GROUP, ZERO) * block) + lane * 16
            ask_piece(at, grid[0] + block * grid[1], sizes[block], lane < LANES)
    asked(lane)
    turn += 1
    source += 128 * WARPS * BLOCKS
    grid = (grid[0] + WARPS * BLOCKS * grid[1], grid[1])
    if turn >= found[TURNS]:
        turn = turn * 0
        tile += 1
        if tile >= found[TILES]:
            tile = tile * 0
            linear, found = from_linear(links, linear + 1, programs, GATES, GROUP, ZERO, WARPS * BLOCKS)
        row = tile_row(tile, found)
        source = lane_source(row, found, lane, warp, BLOCKS)
        grid = grid_source(row, found, lane, warp, GROUP, ZERO, BLOCKS)
    return linear, tile, turn, source, grid, found
