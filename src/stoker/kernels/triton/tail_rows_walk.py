"""Which blocks of which weights a warp of `tail_rows_kernel` multiplies, one after another, and how it asks for them ahead.

A program has one part of a linear's features, and every so manyth tile of 64 rows. Its blocks (a tile × 256 features of the part), tile by
tile, are shared out to four groups of four warps; each warp has 16 rows of its group's blocks. What a warp asks for goes on from linear
to linear.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ring import BLOCK_BYTES, ask_blocks, ask_word, asked, groups_of_block
from stoker.kernels.triton.tail_links import LENGTH, SCALES, STRIDE, WEIGHT, ZEROS, N, chosen, number

GROUPS = tl.constexpr(4)  # of four warps each
TILE = tl.constexpr(64)  # rows of a weight; of a gated one half are gates

# The fields of what `terms` gives, which is what asking for a linear's blocks takes.
FOUR_ROWS, EIGHT_ROWS, NEXT_TILE, ALL_ROWS, NEXT_GRID, BLOCKS, FIRST, COUNT_OF = map(tl.constexpr, range(8))


@triton.constexpr_function
def slot_bytes(group):
    """A warp's 16 rows of a block: codes, the groups' scales of 16 bits, their zeros of up to as many."""
    return BLOCK_BYTES.value + 64 * groups_of_block(group)


@gluon.jit
def part_of(parts, programs):
    """(which part of the features this program has, which it is of the programs that have that part, how many these are)."""
    return gl.program_id(0) % parts, gl.program_id(0) // parts, programs // parts


@gluon.jit
def blocks_of(blocks, part, parts):
    """(the first block of a part of the features, how many it has)."""
    share = gl.cdiv(blocks, parts)
    return part * share, gl.minimum(share, blocks - part * share)


@gluon.jit
def tiles_of(n, rows, index, step):
    """How many tiles of `rows` rows a program has: index, index + step, …"""
    return gl.where(index < step, gl.maximum(0, gl.cdiv(n // rows - index, step)), 0)


@gluon.jit
def share_of(tiles, blocks):
    """How many of a program's blocks, tile by tile, are a group's: so many that no tile has more than two groups."""
    return gl.maximum(gl.cdiv(tiles * blocks, GROUPS), blocks)


@gluon.jit
def blocks_of_group(tiles, blocks, warp):
    """(the first of a program's blocks that are this warp's group's, the one after the last)."""
    share = share_of(tiles, blocks)
    first = gl.minimum(warp // 4 * share, tiles * blocks)
    return first, gl.minimum(first + share, tiles * blocks)


@gluon.jit
def further(grids, lane, numbers, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """The lane's sources of scales and zeros so many numbers on: scales are of 16 bits, whole zeros of 8."""
    scales, zeros = grids
    if GROUP == 128:
        if ZERO == "int":
            scales += gl.where(lane < 16, 2 * numbers, numbers)
        else:
            scales += 2 * numbers
    else:
        scales += 2 * numbers
        zeros += numbers if ZERO == "int" else 2 * numbers
    return scales, zeros


@gluon.jit
def ask_grids(place, grids, all_rows, is_there, lane, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Ask for a block's scales and zeros: of two groups in one request, of more 4 groups' scales, or 8 groups' whole zeros, in each."""
    COUNT: gl.constexpr = groups_of_block(GROUP)
    scales, zeros = grids
    size = gl.where(is_there, 4, 0) + lane * 0
    if GROUP == 128:
        LANES: gl.constexpr = 32 if ZERO == "float" else 24 if ZERO == "int" else 16
        ask_word(place + lane * 4, scales, gl.where(lane < LANES, size, 0))
    else:
        for four in gl.static_range(COUNT // 4):
            ask_word(place + 128 * four + lane * 4, scales + four * 8 * all_rows, size)
            if ZERO == "float":
                ask_word(place + 32 * COUNT + 128 * four + lane * 4, zeros + four * 8 * all_rows, size)
        if ZERO == "int":
            ask_word(place + 32 * COUNT + lane * 4, zeros, gl.where(lane < 4 * COUNT, size, 0))


@gluon.jit
def terms(
    links, linear, programs, lane, warp, GATES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr
):  # fmt: skip
    """(the lane's source of the warp's first block, and those of its scales and zeros; what asking takes of the linear).

    No blocks after the last linear.
    """
    COUNT: gl.constexpr = len(GATES)
    weight = chosen(links, linear, WEIGHT, gl.int64, COUNT)
    scale = chosen(links, linear, SCALES, gl.int64, COUNT)
    zero = chosen(links, linear, SCALES if ZERO == "none" else ZEROS, gl.int64, COUNT)
    n = chosen(links, linear, N, gl.int32, COUNT)
    stride = chosen(links, linear, STRIDE, gl.int64, COUNT)
    length = chosen(links, linear, LENGTH, gl.int32, COUNT)
    gates = 1 + number(GATES, linear, COUNT)
    parts = number(PARTS, linear, COUNT)
    part, index, step = part_of(parts, programs)
    block, blocks = blocks_of(length, part, parts)
    rows = TILE // gates
    tiles = gl.where(linear < COUNT, tiles_of(n, rows, index, step), 0)
    first, end = blocks_of_group(tiles, blocks, warp)
    tile = index + first // blocks * step
    block += first % blocks
    far = gl.where(gates == 2, n, 8)  # from a warp's first eight rows to its second
    row = tile * rows + warp % 4 * (16 // gates)
    source = weight + (row + lane // 8).to(gl.int64) * stride + (block * 128 + lane % 8 * 16)
    GROUPS_HERE: gl.constexpr = groups_of_block(GROUP)
    all_rows = n * gates
    two = lane % 8 * 2
    of_two = (GROUPS_HERE * block + lane // 8 % GROUPS_HERE).to(gl.int64) * all_rows + row + two % 8 + two // 8 * far
    four = lane % 4 * 4
    of_four = (GROUPS_HERE * block + lane // 4 % GROUPS_HERE).to(gl.int64) * all_rows + row + four % 8 + four // 8 * far
    scales = scale + 2 * of_two
    zeros = zero + (of_four if ZERO == "int" else 2 * of_two)
    if GROUP == 128 and ZERO != "none":
        scales = gl.where(lane < 16, scales, zeros)
    away = step * rows
    return source, (scales, zeros), (
        4 * stride, far * stride, away * stride - 128 * blocks,
        all_rows, away - GROUPS_HERE * blocks * all_rows, blocks, first % blocks, end - first,
    )  # fmt: skip


@gluon.jit
def from_linear(
    links, linear, programs, lane, warp, GATES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr
):  # fmt: skip
    """(the first linear from that one on of which this group has blocks, and its `terms`)."""
    source, grids, found = terms(links, linear, programs, lane, warp, GATES, PARTS, GROUP, ZERO)
    while (found[COUNT_OF] == 0) & (linear < len(GATES)):
        linear += 1
        source, grids, found = terms(links, linear, programs, lane, warp, GATES, PARTS, GROUP, ZERO)
    return linear, source, grids, found


@gluon.jit
def begin(links, programs, lane, warp, GATES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Where asking starts: (linear, the block's place in its tile, blocks left, the lane's sources, the linear's terms)."""
    linear, source, grids, found = from_linear(links, gl.to_tensor(0), programs, lane, warp, GATES, PARTS, GROUP, ZERO)
    return linear, found[FIRST], found[COUNT_OF], source, grids, found


@gluon.jit
def ask(state, links, programs, place, lane, warp, GATES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Ask for the warp's rows of its next block, into the slot at `place`. Returns what comes after them."""
    linear, block, left, source, grids, found = state
    wide = lane.to(gl.int64) * 0
    # They don't leave the cache first, as one token's do: sums would stay there instead, to be written to memory while attention reads.
    ask_blocks(place, source, wide + found[FOUR_ROWS], wide + found[EIGHT_ROWS], (gl.where(left > 0, 16, 0),), lane, 1, False)
    ask_grids(place + BLOCK_BYTES, grids, found[ALL_ROWS], left > 0, lane, GROUP, ZERO)
    asked(lane)
    block += 1
    left -= 1
    source += 128
    grids = further(grids, lane, groups_of_block(GROUP) * found[ALL_ROWS], GROUP, ZERO)
    if block == found[BLOCKS]:
        block = block * 0
        source += found[NEXT_TILE]
        grids = further(grids, lane, found[NEXT_GRID], GROUP, ZERO)
    if left == 0:
        linear, source, grids, found = from_linear(links, linear + 1, programs, lane, warp, GATES, PARTS, GROUP, ZERO)
        block = found[FIRST]
        left = found[COUNT_OF]
    return linear, block, left, source, grids, found
