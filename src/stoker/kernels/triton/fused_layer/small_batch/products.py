"""What a warp of the small-batch kernel computes from a pipeline stage: products of weight fragments and activations.

The columns of the matrix instruction (`ptx.mma`) hold tokens. With 8-bit digits column 2t is the coarse digit of token t and column 2t + 1
its fine digit, so lane l, whose sums are columns 2c and 2c + 1 (c = l % 4), has both digits' sums of token c. So four tokens fit the eight
columns. With fp8 and 16-bit activations, both columns are the same token if there are at most four; otherwise column t is token t, and lane
l has the sums of tokens 2c and 2c + 1 (`config.columns_per_token`).
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stoker.kernels.triton.fused_layer.small_batch.config import columns_per_token, scale_bytes
from stoker.kernels.triton.ptx import mma, registers
from stoker.kernels.triton.ptx.pipeline import groups_per_block, row_pair_of
from stoker.kernels.triton.ptx.shared import load_shared_floats, load_shared_pair_as_float, load_shared_words

mma_m16n8 = gluon.jit(mma.mma_m16n8.fn)
e4m3_to_f16 = gluon.jit(mma.e4m3_to_f16.fn)
repeat = gluon.jit(registers.repeat.fn)


@triton.constexpr_function
def piece_bytes(config):
    """Contiguous bytes of a row that a lane multiplies at a time: 8 for groups of 32, so that an instruction's features are one group's."""
    return 8 if config.group_size == 32 else 16


@gluon.jit
def add_byte_products(acc, words, activations, CONFIG: gl.constexpr):
    """acc + the products of one step, for formats other than int4.

    `acc`: four registers for each half block. They are independent, because an instruction waits for the previous one on its accumulator.
    `words`: 16 registers per block (`load_row_pairs`). `activations`: shared address of this lane's activations of the step.
    """
    KIND: gl.constexpr = "e4m3" if CONFIG.format == "fp8" else CONFIG.format
    sums = ()
    for half in gl.static_range(2 * CONFIG.blocks_per_stage):
        tokens = load_shared_words(activations, 64 * half, 4)
        if CONFIG.format == "fp8":
            tokens = e4m3_to_f16(tokens)
        sums = sums + mma_m16n8(
            acc[4 * half : 4 * half + 4], words[8 * half : 8 * half + 4], words[8 * half + 4 : 8 * half + 8], tokens, KIND
        )
    return sums


@gluon.jit
def load_scales(address, lane, CONFIG: gl.constexpr):
    """(scales, zeros) of the groups of a stage for this lane's two rows: float32 registers [block, group, row]; zeros may be ().

    `address` is that of the stage's scales.
    """
    BLOCKS: gl.constexpr = CONFIG.blocks_per_stage
    GROUPS: gl.constexpr = groups_per_block(CONFIG.group_size)
    SCALE_DTYPE: gl.constexpr = CONFIG.scale_dtype
    row = row_pair_of(lane)
    scales = ()
    zeros = ()
    for block in gl.static_range(BLOCKS):
        for group in gl.static_range(GROUPS):
            of_group = address + (scale_bytes(CONFIG) * block + 32 * group)
            scales = scales + load_shared_pair_as_float(of_group + 2 * row, SCALE_DTYPE)
            if CONFIG.zero_kind == "int":
                zeros = zeros + load_shared_pair_as_float(of_group + (32 * GROUPS - 16 * group) + row, "byte")
            elif CONFIG.zero_kind == "float":
                zeros = zeros + load_shared_pair_as_float(of_group + 32 * GROUPS + 2 * row, SCALE_DTYPE)
    return scales, zeros


@gluon.jit
def group_products(words, activations, zero, CONFIG: gl.constexpr):
    """Integer products of one step of int4, group by group: four registers per group, eight in groups of 128.

    A pair of groups shares bytes: the first has the low nibbles, the second the high ones. High nibbles are not shifted before the product,
    which makes their products 16 times as large (`add_group` divides). Groups of 128 have two independent accumulators. `zero`: an int32
    register of zeros.
    """
    BLOCKS: gl.constexpr = CONFIG.blocks_per_stage
    GROUP_SIZE: gl.constexpr = CONFIG.group_size
    products = ()
    for block in gl.static_range(BLOCKS):
        if GROUP_SIZE == 32:
            for pair in gl.static_range(4):
                upper = words[16 * block + 4 * pair : 16 * block + 4 * pair + 2]
                lower = words[16 * block + 4 * pair + 2 : 16 * block + 4 * pair + 4]
                both = load_shared_words(activations, 256 * block + 64 * pair, 4)
                for side in gl.static_range(2):
                    tokens = both[2 * side : 2 * side + 2]
                    products = products + mma_m16n8(repeat(zero, 4), upper, lower, tokens, "low" if side == 0 else "upper")
        else:
            for pair in gl.static_range(128 // GROUP_SIZE):
                for side in gl.static_range(2):
                    for half in gl.static_range(pair, pair + GROUP_SIZE // 64):
                        upper = words[16 * block + 8 * half : 16 * block + 8 * half + 4]
                        lower = words[16 * block + 8 * half + 4 : 16 * block + 8 * half + 8]
                        tokens = load_shared_words(activations, 256 * block + GROUP_SIZE * side + 64 * (pair + half), 4)
                        products = products + mma_m16n8(repeat(zero, 4), upper, lower, tokens, "low" if side == 0 else "upper")
    return products


@gluon.jit
def add_group(acc, products, group_sum, scales, zeros, side, CONFIG: gl.constexpr):
    """acc + the result of one group, (254 × coarse + fine - zero × group_sum) × scale, for this lane's two rows and its token.

    `products`: registers c0 … c3 of one or two accumulators. `side`: 1 where products are 16 times as large, else 0.
    """
    sums = ()
    for row in gl.static_range(2):
        coarse = products[2 * row]
        fine = products[2 * row + 1]
        if len(products) == 8:
            coarse += products[2 * row + 4]
            fine += products[2 * row + 5]
        value = (coarse * 254 + fine).to(gl.float32)
        if side == 1:
            value *= 0.0625
        if CONFIG.zero_kind == "none":
            sums = sums + (acc[row] + scales[row] * (value - 8.0 * group_sum),)
        elif CONFIG.zero_kind == "int":
            sums = sums + (acc[row] + scales[row] * (value - zeros[row] * group_sum),)
        else:
            sums = sums + (acc[row] + scales[row] * value + zeros[row] * group_sum,)
    return sums


@gluon.jit
def add_group_products(acc, products, group_sums, scales_zeros, CONFIG: gl.constexpr):
    """acc (two registers: this lane's rows) + the results of all groups of a step.

    `group_sums` is the shared address of the group sums of this lane's token; `scales_zeros` is a result of `load_scales`.
    """
    scales, zeros = scales_zeros
    BLOCKS: gl.constexpr = CONFIG.blocks_per_stage
    GROUPS: gl.constexpr = groups_per_block(CONFIG.group_size)
    EACH: gl.constexpr = len(products) // (GROUPS * BLOCKS)  # registers of a group
    sums = acc
    for block in gl.static_range(BLOCKS):
        of_block = load_shared_floats(group_sums + 4 * GROUPS * block, GROUPS)
        for group in gl.static_range(GROUPS * block, GROUPS * block + GROUPS):
            of_group = products[EACH * group : EACH * group + EACH]
            sums = add_group(
                sums,
                of_group,
                of_block[group % GROUPS],
                scales[2 * group : 2 * group + 2],
                zeros[2 * group : 2 * group + 2],
                group % 2,
                CONFIG,
            )
    return sums


@gluon.jit
def sums_of_rows(acc, CONFIG: gl.constexpr):
    """Combine the accumulators of `add_byte_products` or `add_group_products`. Returns a tuple: this lane's tokens of its first row, then
    of its second row, as float32 sums of products. Lane l has token l % 4, or tokens 2 × (l % 4) and 2 × (l % 4) + 1.
    """
    if CONFIG.format == "int4":
        sums = acc
    else:
        sums = ()
        for row in gl.static_range(2):
            first = acc[2 * row]
            second = acc[2 * row + 1]
            for half in gl.static_range(1, 2 * CONFIG.blocks_per_stage):
                first += acc[4 * half + 2 * row]
                second += acc[4 * half + 2 * row + 1]
            if CONFIG.format == "bytes":
                first = first.to(gl.float32) * 254.0 + second.to(gl.float32)
            sums = sums + (first,)
            if columns_per_token(CONFIG) == 1:
                sums = sums + (second,)
    return sums
