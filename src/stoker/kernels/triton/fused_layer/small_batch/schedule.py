"""The tile schedule of the small-batch kernel, and the prefetch that follows it.

A CTA has a contiguous range of 16-row tiles of each linear (`tiles_of_cta`). All its warps work on the same tile, each on its own features:
in a *step* a warp takes `blocks_per_stage` blocks of 128 bytes of the tile's rows.

    row of a weight, in blocks     warp 0 | warp 1 | … | warp 7 | warp 0 | warp 1 | … | warp 7 | …        (one block per stage)
                                   step 0                       | step 1                       | …

The order of a warp's blocks is: linear by linear, tile by tile, step by step; of a gated linear 16 gate rows, then the 16 rows that they
gate. `prefetch` issues the copies of the warp's next blocks in this order, across the ends of tiles and of linears: weights depend on
nothing, so the pipeline fills while the CTA waits at the grid barrier and quantizes activations.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.linear_args import field_number, select_field, select_number
from stoker.kernels.triton.fused_layer.small_batch.config import scale_bytes
from stoker.kernels.triton.ptx.pipeline import BLOCK_BYTES, commit_copies, groups_per_block, issue_block_copies, issue_copy_16


class LinearTiles(NamedTuple):
    """The properties of one linear that the prefetch needs."""

    weight: Any  # int64: address
    scale: Any  # int64
    zero: Any  # int64
    stride_row: Any  # bytes from a row to the next
    row_blocks: Any  # blocks of 128 bytes in a row
    n: Any  # rows of one part
    num_parts: Any  # 2 when gated (gates, then what they gate), else 1
    first_row: Any  # of this CTA
    num_tiles: Any  # of this CTA, of all parts; 0 after the last linear
    num_steps: Any  # of a tile


class SmallBatchPrefetchState(NamedTuple):
    """The state of a warp's prefetch: the step that it copies next."""

    linear: Any  # index
    tile: Any  # of the CTA's tiles of the linear
    step: Any  # of the tile
    source: Any  # int64: this lane's first 16 bytes of the next blocks
    scale_source: Any  # int64: this lane's 16 bytes of the scales or zeros of the next block
    scale_stride: Any  # int64: from a block to the next one
    tiles: Any  # LinearTiles


@gluon.jit
def tiles_of_cta(n, num_ctas):
    """(first 16-row tile, number of tiles) of this CTA in a linear with n output features."""
    tiles = n // 16
    per_cta = gl.cdiv(tiles, num_ctas)
    first = gl.minimum(gl.program_id(0) * per_cta, tiles)
    return first, gl.minimum(per_cta, tiles - first)


@gluon.jit
def linear_tiles(linears, index, num_ctas, CONFIG: gl.constexpr):
    """The `LinearTiles` of the linear with run-time index `index`. After the last linear it has no tiles."""
    GATED: gl.constexpr = CONFIG.gated
    COUNT: gl.constexpr = len(GATED)
    STEP_BLOCKS: gl.constexpr = CONFIG.num_warps * CONFIG.blocks_per_stage
    weight = select_field(linears, index, field_number("weight_ptr"), gl.int64, COUNT)
    scale = weight
    zero = weight
    if CONFIG.group_size > 0:
        scale = select_field(linears, index, field_number("scale_ptr"), gl.int64, COUNT)
        if CONFIG.zero_kind != "none":
            zero = select_field(linears, index, field_number("zero_ptr"), gl.int64, COUNT)
    n = select_field(linears, index, field_number("n"), gl.int32, COUNT)
    stride_row = select_field(linears, index, field_number("stride_row"), gl.int64, COUNT)
    row_blocks = select_field(linears, index, field_number("row_blocks"), gl.int32, COUNT)
    num_parts = 1 + select_number(GATED, index, COUNT)
    first, mine = tiles_of_cta(n, num_ctas)
    num_tiles = gl.where(index < COUNT, mine * num_parts, 0)
    return LinearTiles(weight, scale, zero, stride_row, row_blocks, n, num_parts, first * 16, num_tiles, gl.cdiv(row_blocks, STEP_BLOCKS))


@gluon.jit
def next_linear_with_tiles(linears, index, num_ctas, CONFIG: gl.constexpr):
    """(index, `LinearTiles`) of the first linear with at least the given index of which this CTA has tiles."""
    tiles = linear_tiles(linears, index, num_ctas, CONFIG)
    while (tiles.num_tiles == 0) & (index < len(CONFIG.gated)):
        index += 1
        tiles = linear_tiles(linears, index, num_ctas, CONFIG)
    return index, tiles


@gluon.jit
def tile_row(tile, tiles):
    """The first row of tile number `tile` in the weight. In a gated linear, tiles of gates alternate with tiles of the rows that they gate.

    `num_parts` is 1 or 2, so that no division is needed, which would take 150 cycles.
    """
    second = tiles.num_parts - 1
    return tiles.first_row + (tile >> second) * 16 + (tile & second) * tiles.n


@gluon.jit
def weight_source(row, tiles, lane, warp, CONFIG: gl.constexpr):
    """int64: the address of the first 16 bytes that this lane copies of a tile.

    They are in row lane / 8, at chunk lane % 8 of the warp's first block.
    """
    byte = (warp * (128 * CONFIG.blocks_per_stage) + lane % 8 * 16).to(gl.int64)
    return tiles.weight + byte + (row + lane // 8).to(gl.int64) * tiles.stride_row


@gluon.jit
def scale_source(row, tiles, lane, warp, CONFIG: gl.constexpr):
    """(address of the first 16 bytes of scales or zeros that this lane copies of a tile, bytes from a block to the next).

    The first 2 × groups lanes copy scales of eight rows each; the lanes after them zeros, of eight rows (16 bits) or 16 rows (bytes).
    """
    GROUPS: gl.constexpr = groups_per_block(CONFIG.group_size)
    rows = (tiles.n * tiles.num_parts).to(gl.int64)
    group = warp * (GROUPS * CONFIG.blocks_per_stage)
    source = tiles.scale + ((group + lane % (2 * GROUPS) // 2) * rows + row + lane % 2 * 8) * 2
    stride = lane.to(gl.int64) * 0 + 2 * GROUPS * rows
    if CONFIG.zero_kind == "float":
        source = gl.where(lane < 2 * GROUPS, source, source - tiles.scale + tiles.zero)
    elif CONFIG.zero_kind == "int":
        source = gl.where(lane < 2 * GROUPS, source, tiles.zero + (group + lane % GROUPS) * rows + row)
        stride = gl.where(lane < 2 * GROUPS, stride, GROUPS * rows)
    return source, stride


@gluon.jit
def begin_prefetch(linears, num_ctas, lane, warp, CONFIG: gl.constexpr):
    """The prefetch state at the first tile of the first linear."""
    zero = gl.to_tensor(0)
    index, tiles = next_linear_with_tiles(linears, zero, num_ctas, CONFIG)
    row = tile_row(zero, tiles)
    source = weight_source(row, tiles, lane, warp, CONFIG)
    scales, scale_stride = scale_source(row, tiles, lane, warp, CONFIG)
    return SmallBatchPrefetchState(index, zero, zero, source, scales, scale_stride, tiles)


@gluon.jit
def prefetch(state, linears, num_ctas, stage, lane, warp, CONFIG: gl.constexpr):
    """Issue the copies of the warp's next blocks into the stage at address `stage`, as one group. Returns the advanced state.

    Beyond the end of a row, and after the last linear, a stage is filled with zeros, so that every step commits one group.
    """
    BLOCKS: gl.constexpr = CONFIG.blocks_per_stage
    WARPS: gl.constexpr = CONFIG.num_warps
    index, tile, step, source, scales, scale_stride, tiles = state
    left = gl.where(tile < tiles.num_tiles, tiles.row_blocks, 0) - (step * WARPS + warp) * BLOCKS
    sizes = ()
    for block in gl.static_range(BLOCKS):
        sizes = sizes + (gl.where(left > block, 16, 0),)
    four_rows = lane.to(gl.int64) * 0 + 4 * tiles.stride_row
    issue_block_copies(stage, source, four_rows, 2 * four_rows, sizes, lane, BLOCKS, True)
    if CONFIG.group_size > 0:
        GROUPS: gl.constexpr = groups_per_block(CONFIG.group_size)
        LANES: gl.constexpr = 4 * GROUPS if CONFIG.zero_kind == "float" else 3 * GROUPS if CONFIG.zero_kind == "int" else 2 * GROUPS
        for block in gl.static_range(BLOCKS):
            address = stage + (BLOCKS * BLOCK_BYTES + scale_bytes(CONFIG) * block) + lane * 16
            issue_copy_16(address, scales + block * scale_stride, sizes[block], lane < LANES)
    commit_copies(lane)
    step += 1
    source += 128 * WARPS * BLOCKS
    scales = scales + WARPS * BLOCKS * scale_stride
    if step >= tiles.num_steps:
        step = step * 0
        tile += 1
        if tile >= tiles.num_tiles:
            tile = tile * 0
            index, tiles = next_linear_with_tiles(linears, index + 1, num_ctas, CONFIG)
        row = tile_row(tile, tiles)
        source = weight_source(row, tiles, lane, warp, CONFIG)
        scales, scale_stride = scale_source(row, tiles, lane, warp, CONFIG)
    return SmallBatchPrefetchState(index, tile, step, source, scales, scale_stride, tiles)
