"""Scales and zeros of a warp's 16 rows of a block, from a slot of its ring into the registers that `operand.add_block` takes."""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.ptx.pipeline import groups_of_block, take_number, take_words, warp_together
from stoker.kernels.triton.ptx.wgmma import CODE_SCALES, SUM_SCALE, pair_of

PAIR_BYTES = gl.constexpr(288)  # 8 of each row and group, and more so that lanes which read two pairs' read different banks


@triton.constexpr_function
def exchange_bytes(group):
    """Of a warp: what its lanes make for each other of every row and group. In groups of 32 each lane makes what it needs itself."""
    return PAIR_BYTES.value * groups_of_block(group) // 2 if group > 32 else 0


@gluon.jit
def take_grid(place, exchange, lane, SCALE: gl.constexpr, ZERO: gl.constexpr, GROUP: gl.constexpr):
    """(scales, lows) of a lane's two rows in its pair of a block's groups. Afterwards the slot may be asked for again.

    place: of the slot's scales; exchange: `exchange_bytes` of this warp's. In larger groups lanes with the same rows need the same: then
    each lane makes a row of one group of each pair.
    """
    PAIRS: gl.constexpr = groups_of_block(GROUP) // 2
    pair = lane % 4 * 32 // GROUP
    scales = ()
    lows = ()
    if GROUP == 32:
        for nth in gl.static_range(4):
            row = 8 * (nth // 2) + lane // 4
            scale, low = made(place, pair, nth % 2 * 16 + row, CODE_SCALES[nth % 2], SCALE, ZERO, GROUP)
            scales = scales + (scale,)
            lows = lows + (low,)
        warp_together(lane)
    else:
        side = gl.where(lane < 16, CODE_SCALES[0], CODE_SCALES[1])
        for nth in gl.static_range(PAIRS):
            scale, low = made(place, nth, lane, side, SCALE, ZERO, GROUP)
            put_two(exchange + PAIR_BYTES * nth + 8 * lane, scale, low)
        warp_together(lane)
        for nth in gl.static_range(4):
            scale, low = take_words(exchange + PAIR_BYTES * pair + lane // 4 * 8, 128 * (nth % 2) + 64 * (nth // 2), 2)
            scales = scales + (scale,)
            lows = lows + (low,)
    return scales, lows


@gluon.jit
def made(place, pair, at, code_scale, SCALE: gl.constexpr, ZERO: gl.constexpr, GROUP: gl.constexpr):
    """(a scale × code_scale, the value of code 0 × SUM_SCALE), each twice in a register. at: 16 × the side of the pair + the row."""
    ZEROS_AT: gl.constexpr = 32 * groups_of_block(GROUP)
    scale = take_number(place + 64 * pair + 2 * at, SCALE).to(gl.bfloat16).to(gl.float32)
    if ZERO == "none":
        low = scale * (-8.0 * SUM_SCALE)
    elif ZERO == "int":
        low = scale * -SUM_SCALE * take_number(place + ZEROS_AT + 32 * pair + at, "byte")
    else:
        low = take_number(place + ZEROS_AT + 64 * pair + 2 * at, SCALE) * SUM_SCALE
    return pair_of(scale * code_scale), pair_of(low)


@gluon.jit
def put_two(place, one, other):
    gl.inline_asm_elementwise(
        "st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, $1;", "=r,r,r,r", [place, one, other], dtype=gl.int32, is_pure=False, pack=1
    )
