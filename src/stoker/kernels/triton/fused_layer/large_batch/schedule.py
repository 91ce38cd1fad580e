"""The tile schedule of the large-batch kernel, and the prefetch that follows it.

The input features of a linear are cut into SPLIT_K slices of whole blocks (256 features). CTA i has slice i % SPLIT_K, and of the weight's
64-row tiles every step-th one from index i // SPLIT_K on, where step is the number of CTAs with the same slice:

    SPLIT_K = 2, 6 CTAs                          slice 0     slice 1
                                       tile 0     CTA 0       CTA 1
                                       tile 1     CTA 2       CTA 3
                                       tile 2     CTA 4       CTA 5
                                       tile 3     CTA 0       CTA 1         and so on

The CTA's blocks (tile by tile, each with the blocks of its slice) are shared out to its four warpgroups in contiguous, equal runs of at
least a tile, so at most two warpgroups have blocks of one tile: its *segments*, whose partial sums are stored apart.

    3 tiles of 4 blocks        tile 0      tile 1      tile 2
    warpgroup                  0 0 0 0     1 1 1 1     2 2 2 2                     runs of max(⌈12 / 4⌉, 4) = 4 blocks
    5 tiles of 2 blocks        0 0  0 1  1 1  2 2  2 3                             runs of ⌈10 / 4⌉ = 3: tiles 1 and 4 have two segments

Each warp of a warpgroup has 16 of the tile's 64 rows; of a gated linear 8 gates and the 8 rows that they gate, so that both are in one
lane.

All of a warp's runs are computed once at the start (`write_schedule`), one thread per warp and linear, and kept in shared memory: with its
divisions this took 1.4 µs at the end of every linear when each warp did it for itself. A schedule entry:

    byte  0  address of the warp's first row of its first block (int64)      36  rows from one of the CTA's tiles to the next
          8  address of the scales of these (int64)                          40  blocks of a tile: of the slice
         16  address of the zeros of these (int64)                           44  the first block, counted within its tile
         24  bytes from row to row                                           48  number of blocks of the warp's run
         28  rows from the warp's row 0 to its row 8                         52  the first tile
         32  rows of the weight                                              56  number of tiles of the CTA
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.config import NUM_WARPGROUPS, NUM_WARPS, SCHEDULE_ENTRY_BYTES, TILE_ROWS
from stoker.kernels.triton.fused_layer.linear_args import field_number, select_field, select_number
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, commit_copies, groups_per_block, issue_block_copies, issue_copy_4
from stoker.kernels.triton.ptx.registers import ptx
from stoker.kernels.triton.ptx.shared import load_shared_words

# Offsets in a schedule entry, in bytes.
STRIDE_ROW, ROWS_TO_EIGHT, ALL_ROWS, TILE_STRIDE, BLOCKS, FIRST_BLOCK, RUN_LENGTH, FIRST_TILE, NUM_TILES = map(
    tl.constexpr, range(24, 60, 4)
)


class LargeBatchPrefetchState(NamedTuple):
    """The state of a warp's prefetch: the block that it copies next."""

    linear: Any  # index
    block: Any  # of the tile
    left: Any  # blocks of the run that are not issued yet
    source: Any  # int64: this lane's first 16 bytes of the next block
    scale_source: Any  # int64: this lane's 4 bytes of its scales
    zero_source: Any  # int64: of its zeros
    four_rows: Any  # bytes from a row to the fourth row after it
    eight_rows: Any  # int64: bytes from the warp's row 0 to its row 8
    all_rows: Any  # rows of the weight: values from a group's scales to the next group's
    blocks: Any  # of a tile


@gluon.jit
def slice_of_cta(split_k, num_ctas):
    """(index of this CTA's slice, index of this CTA among those with the same slice, number of CTAs with the same slice)."""
    return gl.program_id(0) % split_k, gl.program_id(0) // split_k, num_ctas // split_k


@gluon.jit
def blocks_of_slice(blocks, slice_idx, split_k):
    """(index of the slice's first block, number of its blocks), where a row has `blocks` blocks."""
    per_slice = gl.cdiv(blocks, split_k)
    return slice_idx * per_slice, gl.minimum(per_slice, blocks - slice_idx * per_slice)


@gluon.jit
def num_tiles_of_cta(n, tile_outputs, index, step):
    """The number of tiles index, index + step, … of a linear with n outputs, `tile_outputs` per tile. 0 if index >= step."""
    return gl.where(index < step, gl.maximum(0, gl.cdiv(n // tile_outputs - index, step)), 0)


@gluon.jit
def run_length(tiles, blocks):
    """The number of blocks per warpgroup when a CTA has `tiles` tiles of `blocks` blocks.

    It is at least one tile's, so that no tile is divided among three warpgroups.
    """
    return gl.maximum(gl.cdiv(tiles * blocks, NUM_WARPGROUPS), blocks)


@gluon.jit
def run_of_warpgroup(tiles, blocks, warp):
    """(index of the first block of this warp's warpgroup, index after its last), among the CTA's tiles × blocks."""
    length = run_length(tiles, blocks)
    first = gl.minimum(warp // 4 * length, tiles * blocks)
    return first, gl.minimum(first + length, tiles * blocks)


@gluon.jit
def advance_scales(scales, zeros, lane, count, GROUP_SIZE: gl.constexpr, ZERO_KIND: gl.constexpr):
    """The lane's source addresses of scales and zeros, advanced by `count` values. Scales have 2 bytes; zeros have 1 ("int") or 2.

    With groups of 128, one copy loads both (`issue_scale_copies`), and `scales` is this lane's source of either.
    """
    if GROUP_SIZE == 128:
        if ZERO_KIND == "int":
            scales += gl.where(lane < 16, 2 * count, count)
        else:
            scales += 2 * count
    else:
        scales += 2 * count
        zeros += count if ZERO_KIND == "int" else 2 * count
    return scales, zeros


@gluon.jit
def issue_scale_copies(address, scales, zeros, all_rows, is_valid, lane, GROUP_SIZE: gl.constexpr, ZERO_KIND: gl.constexpr):
    """Issue the copies of a block's scales and zeros, 4 bytes per lane.

    Groups of 128: two groups' scales (lanes 0–15) and zeros (lanes 16 on) in one copy. Smaller groups: four groups' scales per copy, and
    four groups' 16-bit zeros or all groups' 8-bit zeros.
    """
    GROUPS: gl.constexpr = groups_per_block(GROUP_SIZE)
    size = gl.where(is_valid, 4, 0) + lane * 0
    if GROUP_SIZE == 128:
        LANES: gl.constexpr = 32 if ZERO_KIND == "float" else 24 if ZERO_KIND == "int" else 16
        issue_copy_4(address + lane * 4, scales, gl.where(lane < LANES, size, 0))
    else:
        for four in gl.static_range(GROUPS // 4):
            issue_copy_4(address + 128 * four + lane * 4, scales + four * 8 * all_rows, size)
            if ZERO_KIND == "float":
                issue_copy_4(address + 32 * GROUPS + 128 * four + lane * 4, zeros + four * 8 * all_rows, size)
        if ZERO_KIND == "int":
            issue_copy_4(address + 32 * GROUPS + lane * 4, zeros, gl.where(lane < 4 * GROUPS, size, 0))


@gluon.jit
def write_schedule(linears, num_ctas, schedule, thread, CONFIG: gl.constexpr):
    """Write the schedule entries of all warps and linears to `schedule`, and empty ones after the last linear.

    One thread writes one entry.
    """
    GATED: gl.constexpr = CONFIG.gated
    SPLIT_K: gl.constexpr = CONFIG.split_k
    COUNT: gl.constexpr = len(GATED)
    linear = thread // NUM_WARPS
    warp = thread % NUM_WARPS
    scale = select_field(linears, linear, field_number("scale_ptr"), gl.int64, COUNT)
    zero = select_field(linears, linear, field_number("scale_ptr" if CONFIG.zero_kind == "none" else "zero_ptr"), gl.int64, COUNT)
    n = select_field(linears, linear, field_number("n"), gl.int32, COUNT)
    stride_row = select_field(linears, linear, field_number("stride_row"), gl.int64, COUNT)
    num_parts = 1 + select_number(GATED, linear, COUNT)
    split_k = select_number(SPLIT_K, linear, COUNT)
    slice_idx, index, step = slice_of_cta(split_k, num_ctas)
    block, blocks = blocks_of_slice(select_field(linears, linear, field_number("row_blocks"), gl.int32, COUNT), slice_idx, split_k)
    tile_outputs = TILE_ROWS // num_parts
    tiles = gl.where(linear < COUNT, num_tiles_of_cta(n, tile_outputs, index, step), 0)
    first, end = run_of_warpgroup(tiles, blocks, warp)
    tile = index + first // blocks * step
    block += first % blocks
    row = tile * tile_outputs + warp % 4 * (16 // num_parts)
    all_rows = n * num_parts
    value = (groups_per_block(CONFIG.group_size) * block).to(gl.int64) * all_rows + row  # in [groups, rows] of scales and zeros
    weight = select_field(linears, linear, field_number("weight_ptr"), gl.int64, COUNT) + row.to(gl.int64) * stride_row + block * 128
    rows_to_eight = gl.where(num_parts == 2, n, 8)
    entry = schedule + thread * SCHEDULE_ENTRY_BYTES
    fields = (weight, scale + 2 * value, zero + (value if CONFIG.zero_kind == "int" else 2 * value))
    fields += (stride_row.to(gl.int32), rows_to_eight, all_rows, step * tile_outputs, blocks, first % blocks, end - first, tile, tiles)
    is_valid = (thread < NUM_WARPS * (COUNT + 1)).to(gl.int32)
    gl.inline_asm_elementwise(
        _STORE_ENTRY, "=r,r,r,l,l,l,r,r,r,r,r,r,r,r,r", (entry, is_valid) + fields, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def schedule_entry(schedule, linear, warp):
    """The shared-memory address of a warp's schedule entry for a linear."""
    return schedule + (linear * NUM_WARPS + warp) * SCHEDULE_ENTRY_BYTES


@gluon.jit
def load_addresses(entry):
    """(address of the weight, of its scales, of its zeros), int64, where the first block of a warp in a linear begins.

    `entry` is the shared address of the warp's schedule entry for the linear (`schedule_entry`).
    """
    return gl.inline_asm_elementwise(_LOAD_ADDRESSES, "=&l,=&l,=&l,r", [entry], dtype=(gl.int64, gl.int64, gl.int64), is_pure=False, pack=1)


@gluon.jit
def begin_linear(schedule, linear, lane, warp, CONFIG: gl.constexpr):
    """The prefetch state at the first linear with number >= `linear` of which this warp has blocks.

    After the last linear, the state has no blocks left.
    """
    COUNT: gl.constexpr = len(CONFIG.gated)
    GROUPS: gl.constexpr = groups_per_block(CONFIG.group_size)
    entry = schedule_entry(schedule, linear, warp)
    (left,) = load_shared_words(entry, RUN_LENGTH, 1)
    while (left == 0) & (linear < COUNT):
        linear += 1
        entry = schedule_entry(schedule, linear, warp)
        (left,) = load_shared_words(entry, RUN_LENGTH, 1)
    weight, scale, zero = load_addresses(entry)
    stride_row, rows_to_eight = load_shared_words(entry, STRIDE_ROW, 2)
    all_rows, _, blocks, block = load_shared_words(entry, ALL_ROWS, 4)
    source = weight + (lane // 8 * stride_row + lane % 8 * 16)
    two = lane % 8 * 2  # the first of two rows whose scales this lane copies
    four = lane % 4 * 4  # the first of four rows whose 8-bit zeros this lane copies
    scales = scale + 2 * (lane // 8 % GROUPS * all_rows + two % 8 + two // 8 * rows_to_eight)
    if CONFIG.zero_kind == "int":
        zeros = zero + (lane // 4 % GROUPS * all_rows + four % 8 + four // 8 * rows_to_eight)
    else:
        zeros = scales - scale + zero
    if CONFIG.group_size == 128 and CONFIG.zero_kind != "none":
        scales = gl.where(lane < 16, scales, zeros)
    return LargeBatchPrefetchState(
        linear, block, left, source, scales, zeros, 4 * stride_row, rows_to_eight.to(gl.int64) * stride_row, all_rows, blocks
    )


@gluon.jit
def prefetch(state, schedule, stage, lane, warp, CONFIG: gl.constexpr):
    """Issue the copies of the warp's rows of its next block into the stage at address `stage`, as one group. Returns the advanced state.

    After the last block a stage is filled with zeros, so that every call commits one group.
    """
    GROUP_SIZE: gl.constexpr = CONFIG.group_size
    ZERO_KIND: gl.constexpr = CONFIG.zero_kind
    GROUPS: gl.constexpr = groups_per_block(GROUP_SIZE)
    linear, block, left, source, scales, zeros, four_rows, eight_rows, all_rows, blocks = state
    wide = lane.to(gl.int64) * 0
    # Without evict_first, unlike the small-batch kernel: partial sums would stay in L2 instead, and be written back while attention reads.
    issue_block_copies(stage, source, wide + four_rows, wide + eight_rows, (gl.where(left > 0, 16, 0),), lane, 1, False)
    issue_scale_copies(stage + BLOCK_BYTES, scales, zeros, all_rows, left > 0, lane, GROUP_SIZE, ZERO_KIND)
    commit_copies(lane)
    block += 1
    left -= 1
    source += 128
    scales, zeros = advance_scales(scales, zeros, lane, GROUPS * all_rows, GROUP_SIZE, ZERO_KIND)
    if block == blocks:
        block = block * 0
        (tile_stride,) = load_shared_words(schedule_entry(schedule, linear, warp), TILE_STRIDE, 1)
        source += tile_stride.to(gl.int64) * (four_rows // 4) - 128 * blocks
        scales, zeros = advance_scales(scales, zeros, lane, tile_stride - GROUPS * blocks * all_rows, GROUP_SIZE, ZERO_KIND)
    if left == 0:
        linear, block, left, source, scales, zeros, four_rows, eight_rows, all_rows, blocks = begin_linear(
            schedule, linear + 1, lane, warp, CONFIG
        )
    return LargeBatchPrefetchState(linear, block, left, source, scales, zeros, four_rows, eight_rows, all_rows, blocks)


_STORE_ENTRY = ptx(
    # $1 the entry, $2 whether it exists, $3 … $5 three addresses, $6 … $14 nine words.
    "{ .reg .pred p;",
    ".reg .b32 a<6>;",
    "setp.ne.b32 p, $2, 0;",
    "mov.b64 {a0, a1}, $3;",
    "mov.b64 {a2, a3}, $4;",
    "mov.b64 {a4, a5}, $5;",
    "@p st.shared.v4.b32 [$1], {a0, a1, a2, a3};",  # addresses of the weight and of the scales
    "@p st.shared.v4.b32 [$1 + 16], {a4, a5, $6, $7};",  # address of the zeros, STRIDE_ROW, ROWS_TO_EIGHT
    "@p st.shared.v4.b32 [$1 + 32], {$8, $9, $10, $11};",  # ALL_ROWS, TILE_STRIDE, BLOCKS, FIRST_BLOCK
    "@p st.shared.v4.b32 [$1 + 48], {$12, $13, $14, 0};",  # RUN_LENGTH, FIRST_TILE, NUM_TILES
    "mov.b32 $0, $1; }",
)

_LOAD_ADDRESSES = ptx(
    "ld.shared.v2.b64 {$0, $1}, [$3];",
    "ld.shared.b64 $2, [$3 + 16];",
)
