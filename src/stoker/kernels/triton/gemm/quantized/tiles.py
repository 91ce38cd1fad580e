"""Chooses the tile of a quantized linear: the measured tile of its shape, or a safe one by rule."""

from __future__ import annotations

import triton

from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.tuning.tiles import QuantTile

SMALLEST_INTEGER_GROUP = 32  # the depth of an 8-bit matrix instruction
FEW_ROWS = 64  # rows up to which weights are streamed once
# More rows than these: weight-only formats widen the weight once and use the library's GEMM. Llama-3.1-8B's up and down projections on an
# H200, µs: int8 digits against 256 rows 144 and 71, widened 238 and 121; int4 against 128 rows 163 and 92, widened 165 and 84.
DIGIT_ROWS = 256
MIDDLE_ROWS = 512  # of FP8 weights and plain activations


def padded_tokens(rows: int, digits: int = 1, columns: int = 16) -> int:
    """Rows of a tile: a power of two, so many that they fill at least `columns` columns, of which a row takes `digits`."""
    return max(columns // digits, triton.next_power_of_2(rows))


def quant_tile(form: str, rows: int, n: int, k: int, gated: bool, num_sms: int, tuning: TuningTable, group: int = 0) -> QuantTile:
    """The tile for at most FEW_ROWS rows (`rows`: padded to a power of two) and a weight [n (2 × n when gated), k as stored].

    `form`: fp8, int8 (weights only), w8a8, block, or digits of int4 in groups of `group` features.
    """
    measured: QuantTile | None = tuning.tile("quantized_linear", form, rows, n, k, gated)
    if measured is not None:
        return measured
    block_n = 64
    if group:
        block_k = largest_block(k, 2 * group, 256 if group < 128 else 2 * group)
    else:
        block_k = 256 if k % 256 == 0 else 128
    splits = splits_of(triton.cdiv(n, block_n), k, block_k, num_sms)
    wide = (gated and rows >= 32) or (group and rows > 32)  # 128 columns of sums need the registers of eight warps
    num_stages = tuning.fitting_stages(4, block_k * (block_n * (2 if gated else 1) + rows))
    return QuantTile(
        block_n, block_k, splits, 8 if wide else 4, num_stages, columns=16 if form == "fp8" else 8, encode=rows == 1 and k <= 8192
    )


def splits_of(programs: int, k: int, block_k: int, num_sms: int) -> int:
    """Programs that share the features, so that each multiprocessor has two and each program three turns."""
    splits = 1
    while programs * splits < 2 * num_sms and k // (block_k * splits * 2) >= 3:
        splits *= 2
    return splits


def digits_pay(rows: int, group: int, bits: int = 4) -> bool:
    """Whether rows of 16 bits meet weights of so many bits in groups as digits, not with the codes widened.

    Every group's sums are joined and scaled, for every row; codes are widened once. Four int4 linears of a layer of Llama-3.1-8B's on an
    H200, in groups of 128: 16 rows take 70 µs as digits and 72 with the codes widened, 32 rows 102 and 84; in groups of 32 133 and 110, 231
    and 122. Whole bytes are operands as they lie, which was not timed.
    """
    return group >= SMALLEST_INTEGER_GROUP and rows <= group // (8 if bits == 4 else 4)


def widened_tile(tokens: int, n: int, k: int, group: int, gated: bool, num_sms: int) -> QuantTile:
    """The tile of few 16-bit rows against int4 that is widened in registers. More stages would leave room for fewer programs at once."""
    block_k = largest_block(k, 2 * group, 256)
    splits = splits_of(triton.cdiv(n, 64), k, block_k, num_sms)
    return QuantTile(64, block_k, splits, 4, 2 if gated and tokens > 32 else 3)


def digits_tile(rows: int, n: int, num_sms: int) -> QuantTile:
    """The tile of int8 weights against the digits of more rows than half of FEW_ROWS, of which it takes that many."""
    row_tiles = triton.cdiv(rows, FEW_ROWS)
    if row_tiles * triton.cdiv(n, 128) >= num_sms // 2:
        return QuantTile(128, 128, 1, 8, 4)
    return QuantTile(64, 128, 2 if row_tiles * triton.cdiv(n, 64) < 2 * num_sms else 1, 4, 4)


def middle_tile(tokens: int, item: int, group: int = 0, k: int = 0) -> QuantTile:
    """The tile where rows fill a matrix instruction's columns too: `tokens` of them. `item`: bytes of an operand."""
    block_k = largest_block(k, 2 * group, 2 * group) if group else max(32, 128 // item)
    if item == 4:
        return QuantTile(32, block_k if group else 32, 1, 4, 2)
    return QuantTile(128, block_k, 1, 8, 3) if tokens > 64 else QuantTile(64, block_k, 1, 4, 4)


def largest_block(k: int, unit: int, most: int) -> int:
    """The largest multiple unit × 2^i of at most `most` (or one unit) that divides k."""
    block = unit
    while block * 2 <= most and k % (block * 2) == 0:
        block *= 2
    return block
