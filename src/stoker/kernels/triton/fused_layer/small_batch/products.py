"""What a warp of the small-batch kernel makes of a slot: products of its rows' registers and the tokens' codes, of int4 scaled by group."""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.small_batch.schedule import grid_bytes
from stoker.kernels.triton.gemm.skinny import kernel as stream_kernel
from stoker.kernels.triton.ptx import mma as fragments
from stoker.kernels.triton.ptx.pipeline import groups_of_block, lane_row, take_floats, take_two, take_words

mma_m16n8 = gluon.jit(fragments.mma_m16n8.fn)
e4m3_to_f16 = gluon.jit(fragments.e4m3_to_f16.fn)
same = gluon.jit(stream_kernel.same.fn)


@triton.constexpr_function
def piece_bytes(group):
    """What a lane has of a pair of groups that lies side by side."""
    return 8 if group == 32 else 16


@gluon.jit
def add_bytes(sums, words, codes, FORM: gl.constexpr, BLOCKS: gl.constexpr):
    """sums + products of a turn, four registers for each half of a block: chains of their own, since each waits for its last product."""
    made = ()
    for half in gl.static_range(2 * BLOCKS):
        given = take_words(codes, 64 * half, 4)
        if FORM == "fp8":
            given = e4m3_to_f16(given)
        made = made + mma_m16n8(
            sums[4 * half : 4 * half + 4], words[8 * half : 8 * half + 4], words[8 * half + 4 : 8 * half + 8], given,
            "e4m3" if FORM == "fp8" else FORM,
        )  # fmt: skip
    return made


@gluon.jit
def take_grid(place, lane, SCALE: gl.constexpr, ZERO: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr):
    """(scales, zeros) of a slot's groups and a lane's two rows; of ZERO none no zeros."""
    COUNT: gl.constexpr = groups_of_block(GROUP)
    row = lane_row(lane)
    scales = ()
    zeros = ()
    for block in gl.static_range(BLOCKS):
        for group in gl.static_range(COUNT):
            at = place + (grid_bytes(GROUP, ZERO) * block + 32 * group)
            scales = scales + take_two(at + 2 * row, SCALE)
            if ZERO == "int":
                zeros = zeros + take_two(at + (32 * COUNT - 16 * group) + row, "byte")
            elif ZERO == "float":
                zeros = zeros + take_two(at + 32 * COUNT + 2 * row, SCALE)
    return scales, zeros


@gluon.jit
def group_products(words, codes, nothing, GROUP: gl.constexpr, BLOCKS: gl.constexpr):
    """Products of a turn of int4, four registers for each group, of groups of 128 eight: two chains, since each waits for its last product.

    A pair of groups is in the same bytes, low nibbles and high ones. The latter are multiplied where they are, which makes their sums 16
    times as large.
    """
    made = ()
    for block in gl.static_range(BLOCKS):
        if GROUP == 32:
            for pair in gl.static_range(4):
                upper = words[16 * block + 4 * pair : 16 * block + 4 * pair + 2]
                lower = words[16 * block + 4 * pair + 2 : 16 * block + 4 * pair + 4]
                given = take_words(codes, 256 * block + 64 * pair, 4)
                for side in gl.static_range(2):
                    mine = given[2 * side : 2 * side + 2]
                    made = made + mma_m16n8(same(nothing, 4), upper, lower, mine, "low" if side == 0 else "upper")
        else:
            for pair in gl.static_range(128 // GROUP):
                for side in gl.static_range(2):
                    for half in gl.static_range(pair, pair + GROUP // 64):
                        upper = words[16 * block + 8 * half : 16 * block + 8 * half + 4]
                        lower = words[16 * block + 8 * half + 4 : 16 * block + 8 * half + 8]
                        given = take_words(codes, 256 * block + GROUP * side + 64 * (pair + half), 4)
                        made = made + mma_m16n8(same(nothing, 4), upper, lower, given, "low" if side == 0 else "upper")
    return made


@gluon.jit
def add_group(sums, raw, total, scales, zeros, side, ZERO: gl.constexpr):
    """sums (two registers: a lane's two rows) + a group's products, scaled."""
    made = ()
    for row in gl.static_range(2):
        coarse = raw[2 * row]
        fine = raw[2 * row + 1]
        if len(raw) == 8:
            coarse += raw[2 * row + 4]
            fine += raw[2 * row + 5]
        value = (coarse * 254 + fine).to(gl.float32)
        if side == 1:
            value *= 0.0625
        if ZERO == "none":
            made = made + (sums[row] + scales[row] * (value - 8.0 * total),)
        elif ZERO == "int":
            made = made + (sums[row] + scales[row] * (value - zeros[row] * total),)
        else:
            made = made + (sums[row] + scales[row] * value + zeros[row] * total,)
    return made


@gluon.jit
def add_groups(sums, products, totals, grid, ZERO: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr):
    """sums + those of all groups of a turn."""
    scales, zeros = grid
    COUNT: gl.constexpr = groups_of_block(GROUP)
    EACH: gl.constexpr = len(products) // (COUNT * BLOCKS)
    made = sums
    for block in gl.static_range(BLOCKS):
        total = take_floats(totals + 4 * COUNT * block, COUNT)
        for at in gl.static_range(COUNT * block, COUNT * block + COUNT):
            raw = products[EACH * at : EACH * at + EACH]
            made = add_group(made, raw, total[at % COUNT], scales[2 * at : 2 * at + 2], zeros[2 * at : 2 * at + 2], at % 2, ZERO)
    return made


@gluon.jit
def row_sums(sums, FORM: gl.constexpr, BLOCKS: gl.constexpr):
    """A lane's two rows' sums, of token lane % 4."""
    if FORM == "int4":
        made = sums
    else:
        made = ()
        for row in gl.static_range(2):
            first = sums[2 * row]
            second = sums[2 * row + 1]
            for half in gl.static_range(1, 2 * BLOCKS):
                first += sums[4 * half + 2 * row]
                second += sums[4 * half + 2 * row + 1]
            if FORM == "bytes":
                first = first.to(gl.float32) * 254.0 + second.to(gl.float32)
            made = made + (first,)
    return made
