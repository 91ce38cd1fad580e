"""Which blocks of which weights a warp of `fused_layer_large_batch_kernel` multiplies, one after another, and how it asks for them ahead.

A program has one part of a linear's features, and every so manyth tile of 64 rows. Its blocks (a tile × 256 features of the part), tile by
tile, are shared out to four groups of four warps; each warp has 16 rows of its group's blocks. What a warp asks for goes on from linear
to linear.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.linear_args import LENGTH, SCALES, STRIDE, WEIGHT, ZEROS, N, chosen, number
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, ask_blocks, ask_word, asked, groups_of_block, take_words

WARPS = tl.constexpr(16)
GROUPS = tl.constexpr(4)  # of four warps each
TILE = tl.constexpr(64)  # rows of a weight; of a gated one half are gates

# A warp's way through a linear (`plan_walks`) in shared memory: addresses of its first row of its first block, of the scales, of the zeros;
# then words of 4 bytes.
WALK_BYTES = tl.constexpr(80)  # 64, and more so that threads which store walks side by side write different banks
ROW_BYTES, FAR, ALL_ROWS, AWAY, BLOCKS, FIRST, COUNT_OF, FIRST_TILE, TILES = map(tl.constexpr, range(24, 60, 4))


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
def plan_walks(
    links, programs, walks, thread, GATES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr
):  # fmt: skip
    """Each warp's way through each linear, and one without blocks after the last, at `walks`: a thread each.

    All at once, before anything is asked for: with its divisions it took each warp 1.4 µs at every linear's end.
    """
    COUNT: gl.constexpr = len(GATES)
    linear = thread // WARPS
    warp = thread % WARPS
    scale = chosen(links, linear, SCALES, gl.int64, COUNT)
    zero = chosen(links, linear, SCALES if ZERO == "none" else ZEROS, gl.int64, COUNT)
    n = chosen(links, linear, N, gl.int32, COUNT)
    stride = chosen(links, linear, STRIDE, gl.int64, COUNT)
    gates = 1 + number(GATES, linear, COUNT)
    parts = number(PARTS, linear, COUNT)
    part, index, step = part_of(parts, programs)
    block, blocks = blocks_of(chosen(links, linear, LENGTH, gl.int32, COUNT), part, parts)
    rows = TILE // gates
    tiles = gl.where(linear < COUNT, tiles_of(n, rows, index, step), 0)
    first, end = blocks_of_group(tiles, blocks, warp)
    tile = index + first // blocks * step
    block += first % blocks
    row = tile * rows + warp % 4 * (16 // gates)
    all_rows = n * gates
    grid = (groups_of_block(GROUP) * block).to(gl.int64) * all_rows + row
    weight = chosen(links, linear, WEIGHT, gl.int64, COUNT) + row.to(gl.int64) * stride + block * 128
    far = gl.where(gates == 2, n, 8)  # rows from a warp's first eight to its second
    place = walks + thread * WALK_BYTES
    kept = (weight, scale + 2 * grid, zero + (grid if ZERO == "int" else 2 * grid))
    kept += (stride.to(gl.int32), far, all_rows, step * rows, blocks, first % blocks, end - first, tile, tiles)
    is_there = (thread < WARPS * (COUNT + 1)).to(gl.int32)
    gl.inline_asm_elementwise(
        _PUTTING_WALK, "=r,r,r,l,l,l,r,r,r,r,r,r,r,r,r", (place, is_there) + kept, dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def walk_of(walks, linear, warp):
    """Where a warp's way through a linear lies."""
    return walks + (linear * WARPS + warp) * WALK_BYTES


@gluon.jit
def take_addresses(walk):
    """(of the weight, of its scales, of its zeros)."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b64 {$0, $1}, [$3]; ld.shared.b64 $2, [$3 + 16];", "=&l,=&l,=&l,r", [walk],
        dtype=(gl.int64, gl.int64, gl.int64), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def from_linear(walks, linear, lane, warp, COUNT: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """The state of `ask` at the first linear, from that one on, of which this warp has blocks."""
    walk = walk_of(walks, linear, warp)
    (left,) = take_words(walk, COUNT_OF, 1)
    while (left == 0) & (linear < COUNT):
        linear += 1
        walk = walk_of(walks, linear, warp)
        (left,) = take_words(walk, COUNT_OF, 1)
    weight, scale, zero = take_addresses(walk)
    row_bytes, far = take_words(walk, ROW_BYTES, 2)
    all_rows, _, blocks, block = take_words(walk, ALL_ROWS, 4)
    source = weight + (lane // 8 * row_bytes + lane % 8 * 16)
    GROUPS_HERE: gl.constexpr = groups_of_block(GROUP)
    two = lane % 8 * 2
    four = lane % 4 * 4
    scales = scale + 2 * (lane // 8 % GROUPS_HERE * all_rows + two % 8 + two // 8 * far)
    if ZERO == "int":
        zeros = zero + (lane // 4 % GROUPS_HERE * all_rows + four % 8 + four // 8 * far)
    else:
        zeros = scales - scale + zero
    if GROUP == 128 and ZERO != "none":
        scales = gl.where(lane < 16, scales, zeros)
    return linear, block, left, source, (scales, zeros), (4 * row_bytes, far.to(gl.int64) * row_bytes, all_rows, blocks)


@gluon.jit
def ask(state, walks, place, lane, warp, COUNT: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr):
    """Ask for the warp's rows of its next block, into the slot at `place`. Returns what comes after them.

    state: the linear, the block's place in its tile, how many blocks are left, the lane's sources, (bytes of four rows and of the way to a
    warp's second eight, rows of a group, blocks of a tile).
    """
    linear, block, left, source, grids, found = state
    four_rows, eight_rows, all_rows, blocks = found
    wide = lane.to(gl.int64) * 0
    # They don't leave the cache first, as one token's do: sums would stay there instead, to be written to memory while attention reads.
    ask_blocks(place, source, wide + four_rows, wide + eight_rows, (gl.where(left > 0, 16, 0),), lane, 1, False)
    ask_grids(place + BLOCK_BYTES, grids, all_rows, left > 0, lane, GROUP, ZERO)
    asked(lane)
    block += 1
    left -= 1
    source += 128
    grids = further(grids, lane, groups_of_block(GROUP) * all_rows, GROUP, ZERO)
    if block == blocks:
        block = block * 0
        (away,) = take_words(walk_of(walks, linear, warp), AWAY, 1)
        source += away.to(gl.int64) * (four_rows // 4) - 128 * blocks
        grids = further(grids, lane, away - groups_of_block(GROUP) * blocks * all_rows, GROUP, ZERO)
    if left == 0:
        linear, block, left, source, grids, found = from_linear(walks, linear + 1, lane, warp, COUNT, GROUP, ZERO)
    return linear, block, left, source, grids, found


_PUTTING_WALK = tl.constexpr(
    "{ .reg .pred p; .reg .b32 a<6>; setp.ne.b32 p, $2, 0; mov.b64 {a0, a1}, $3; mov.b64 {a2, a3}, $4; mov.b64 {a4, a5}, $5; "
    "@p st.shared.v4.b32 [$1], {a0, a1, a2, a3}; @p st.shared.v4.b32 [$1 + 16], {a4, a5, $6, $7}; "
    "@p st.shared.v4.b32 [$1 + 32], {$8, $9, $10, $11}; @p st.shared.v4.b32 [$1 + 48], {$12, $13, $14, 0}; mov.b32 $0, $1; }"
)
