"""Scales and zeros of a warp's 16 rows of a block, from a pipeline stage into the registers that `wgmma_int4_block` takes.

A lane needs, for its rows g and g + 8 (g = l / 4) and the pair of groups in which its 32 bytes lie, the scales and zeros of both groups.
With groups of 64 or 128 several lanes with the same rows need the same ones. Then each lane converts those of one row of one group of each
pair, and the lanes share them through shared memory:

    scratch, per pair of groups, 288 bytes:   | side 0: row 0 … 15 | side 1: row 0 … 15 | 32 |      8 bytes each: scale twice, offset twice

With groups of 32 the four lanes of a row are in different pairs, and each converts its own.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.large_batch.config import PAIR_SCALE_BYTES
from stoker.kernels.triton.ptx.lanes import bf16_twice
from stoker.kernels.triton.ptx.pipeline import groups_per_block
from stoker.kernels.triton.ptx.shared import load_shared_as_float, load_shared_words, store_shared_word_pair
from stoker.kernels.triton.ptx.sync import warp_barrier
from stoker.kernels.triton.ptx.wgmma import SUBNORMAL_SCALES, SUM_SCALE


@gluon.jit
def load_scales(address, scale_scratch, lane, CONFIG: gl.constexpr):
    """(scales, offsets) of this lane, four registers each: row g for both groups of its pair, then row g + 8.

    `address` is that of the scales in the stage; `scale_scratch` that of this warp's scratch. After the call, new copies may be issued into
    the stage.
    """
    SCALE_DTYPE: gl.constexpr = CONFIG.scale_dtype
    ZERO_KIND: gl.constexpr = CONFIG.zero_kind
    GROUP_SIZE: gl.constexpr = CONFIG.group_size
    PAIRS: gl.constexpr = groups_per_block(GROUP_SIZE) // 2
    pair = lane % 4 * 32 // GROUP_SIZE  # in which the lane's 32 bytes lie
    scales = ()
    offsets = ()
    if GROUP_SIZE == 32:
        for nth in gl.static_range(4):
            row = 8 * (nth // 2) + lane // 4
            scale, offset = convert_scale(address, pair, nth % 2 * 16 + row, SUBNORMAL_SCALES[nth % 2], SCALE_DTYPE, ZERO_KIND, GROUP_SIZE)
            scales = scales + (scale,)
            offsets = offsets + (offset,)
        warp_barrier(lane)
    else:
        subnormal_scale = gl.where(lane < 16, SUBNORMAL_SCALES[0], SUBNORMAL_SCALES[1])
        for nth in gl.static_range(PAIRS):
            scale, offset = convert_scale(address, nth, lane, subnormal_scale, SCALE_DTYPE, ZERO_KIND, GROUP_SIZE)
            store_shared_word_pair(scale_scratch + PAIR_SCALE_BYTES * nth + 8 * lane, scale, offset)
        warp_barrier(lane)
        for nth in gl.static_range(4):
            scale, offset = load_shared_words(scale_scratch + PAIR_SCALE_BYTES * pair + lane // 4 * 8, 128 * (nth % 2) + 64 * (nth // 2), 2)
            scales = scales + (scale,)
            offsets = offsets + (offset,)
    return scales, offsets


@gluon.jit
def convert_scale(address, pair, entry, subnormal_scale, SCALE_DTYPE: gl.constexpr, ZERO_KIND: gl.constexpr, GROUP_SIZE: gl.constexpr):
    """(scale × subnormal_scale, value of q = 0 × SUM_SCALE), each as bfloat16 twice in one register, loaded from a stage.

    `pair` is the index of the pair of groups; `entry` is 16 × the side of the pair + the row.
    """
    ZEROS: gl.constexpr = 32 * groups_per_block(GROUP_SIZE)  # bytes of scales, after which zeros lie
    scale = load_shared_as_float(address + 64 * pair + 2 * entry, SCALE_DTYPE).to(gl.bfloat16).to(gl.float32)
    if ZERO_KIND == "none":
        offset = scale * (-8.0 * SUM_SCALE)
    elif ZERO_KIND == "int":
        offset = scale * -SUM_SCALE * load_shared_as_float(address + ZEROS + 32 * pair + entry, "byte")
    else:
        offset = load_shared_as_float(address + ZEROS + 64 * pair + 2 * entry, SCALE_DTYPE) * SUM_SCALE
    return bf16_twice(scale * subnormal_scale), bf16_twice(offset)
