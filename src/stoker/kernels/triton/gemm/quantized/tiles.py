"""Chooses the tile of a quantized linear: the measured tile of its shape, or a safe one by rule.

The limits say up to how many rows each way of multiplying is the fastest. Times are from an H200.
"""

from __future__ import annotations

from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.tuning.tiles import QuantTile

MIN_INT8_GROUP = 32  # the depth of an 8-bit matrix instruction
MAX_SKINNY_ROWS = 64  # rows up to which reading the weight takes longer than multiplying it
# CTAs per SM of `one_round_tile`, of which two fit. With 1.94, 128 rows of a weight 8192 × 14336 took 43.6 µs, and in the library 40.8.
MAX_ROUNDS = 1.9
# Weight-only formats with more rows than these dequantize the weight once and use the library's GEMM. Llama-3.1-8B's gate and up, and down
# projections, µs: int8 by digits against 256 rows 144 and 71, dequantized 238 and 121; int4 against 128 rows 163 and 92, dequantized 165
# and 84.
MAX_DIGIT_ROWS = 256  # of int8 by digits
MAX_UPCAST_ROWS = 512  # of FP8 weights against unquantized activations


def padded_tokens(rows: int, digits: int = 1, columns: int = 16) -> int:
    """The number of tokens of a tile: a power of two of at least `rows`, with at least `columns` columns at `digits` columns per token."""
    return max(columns // digits, next_power_of_2(rows))


def quant_tile(dtype: str, rows: int, n: int, k: int, gated: bool, num_sms: int, tuning: TuningTable, group: int = 0) -> QuantTile:
    """The tile for at most MAX_SKINNY_ROWS rows and a weight [n, k], or [2 × n, k] if gated, k in stored elements.

    `rows` is padded to a power of two. `dtype` is the key of the tuning table: fp8, int8 (weights only), w8a8, block, or int4/GROUP for
    digits against int4 in groups of `group` features.
    """
    measured: QuantTile | None = tuning.tile("quantized_linear", dtype, rows, n, k, gated)
    if measured is not None:
        return measured
    columns = 16 if dtype == "fp8" else 8
    if rows > 1 and not group and dtype != "block":
        return reading_tile(rows * (2 if dtype == "int8" else 1), n, k, gated, num_sms, tuning, columns)
    block_n = 64
    if group:
        block_k = largest_block(k, 2 * group, 256 if group < 128 else 2 * group)
    else:
        block_k = 256 if k % 256 == 0 else 128
    splits = choose_splits(cdiv(n, block_n), k, block_k, num_sms)
    is_wide = (gated and rows >= 32) or (group and rows > 32)  # 128 columns of sums need the registers of eight warps
    num_stages = tuning.fitting_stages(4, block_k * (block_n * (2 if gated else 1) + rows))
    return QuantTile(block_n, block_k, splits, 8 if is_wide else 4, num_stages, columns, encode=rows == 1 and k <= 8192)


def one_round_tile(rows: int, n: int, k: int, gated: bool, num_sms: int, tuning: TuningTable) -> QuantTile | None:
    """The tile for more than MAX_SKINNY_ROWS rows of bytes, with MAX_SKINNY_ROWS tokens, if the CTAs of all tiles run at the same time.

    None: larger tiles or the library are faster. The library's tiles of 128 × 128 leave most SMs idle where weights have few rows.
    Llama-3.1-8B's q, k and v, output and down projection in FP8 with a residual, µs on an H200: 128 rows 13.3, 10.3 and 27.5, with the
    library 14.8, 15.6 and 40.1; 192 rows (20.3), 12.9 and 36.8, with the library 14.7, 16.2 and 41.3.
    """
    token_tiles = cdiv(rows, MAX_SKINNY_ROWS)
    if gated or token_tiles * cdiv(n, 64) > MAX_ROUNDS * num_sms:
        return None
    return reading_tile(MAX_SKINNY_ROWS, n, k, False, num_sms, tuning, 16, token_tiles)


def reading_tile(
    rows: int, n: int, k: int, gated: bool, num_sms: int, tuning: TuningTable, columns: int, token_tiles: int = 1
) -> QuantTile:
    """The tile for several rows of bytes and a weight of bytes with a scale per row: most of the time the weight is read.

    `rows` is the number of columns of each of the `token_tiles` tiles, n and k as in `quant_tile`. Split-K goes no further than to one CTA
    per SM, because sums must be combined, and the stages use the shared memory that the CTAs of an SM have: one, or two if the tiles take
    up to two rounds.
    Measured on an H200, µs of 64 rows of FP8 with Llama-3.1-70B's shapes on two ranks, with two CTAs per SM of four stages and with this
    rule: q, k and v 25.9 and 20.1, output 24.6 and 14.0, gate and up 86.4 and 72.0, down 50.2 and 37.7.
    """
    block_n = 64
    num_ctas = token_tiles * cdiv(n, block_n)
    splits = choose_splits(num_ctas, k, 256, num_sms, ctas_per_sm=0.9)
    rounds = num_ctas * splits / num_sms
    block_k = 128 if k % 256 or 1 < rounds <= 2 else 256
    stage_bytes = block_k * (block_n * (2 if gated else 1) + rows)
    if rounds <= 2:
        num_stages = tuning.fitting_stages(6, stage_bytes * (1 if rounds <= 1 else 2))
    else:  # Qwen2.5-7B's gate and up, 64 rows: 52.2 µs, and 55.6 with smaller blocks and two CTAs per SM
        num_stages = tuning.fitting_stages(4, stage_bytes)
    return QuantTile(block_n, block_k, splits, 8 if gated and rows >= 32 else 4, num_stages, columns)


def choose_splits(num_tiles: int, k: int, block_k: int, num_sms: int, ctas_per_sm: float = 2) -> int:
    """The number of split-K slices, a power of two, so that each SM has at least `ctas_per_sm` CTAs of the `num_tiles` tiles.

    Fewer where a slice would have less than three iterations of block_k features.
    """
    splits = 1
    while num_tiles * splits < ctas_per_sm * num_sms and k // (block_k * splits * 2) >= 3:
        splits *= 2
    return splits


def digits_are_faster(rows: int, group: int, bits: int = 4) -> bool:
    """Whether multiplying digits by `bits`-bit weights in groups is faster than dequantizing the weights for 16-bit activations.

    With digits, the sums of each group are combined and scaled for each token; weights are dequantized once for all tokens. The four int4
    linears of a layer of Llama-3.1-8B, µs: in groups of 128, 16 rows take 70 by digits and 72 dequantized, 32 rows 102 and 84; in groups of
    32, 133 and 110, 231 and 122. The rule for 8 bits, whose values need no unpacking, was not measured.
    """
    return group >= MIN_INT8_GROUP and rows <= group // (8 if bits == 4 else 4)


def dequantizing_tile(tokens: int, n: int, k: int, group: int, gated: bool, num_sms: int) -> QuantTile:
    """The tile for at most MAX_SKINNY_ROWS 16-bit rows and an int4 weight that is dequantized in registers.

    More stages would leave shared memory for fewer CTAs per SM.
    """
    block_k = largest_block(k, 2 * group, 256)
    splits = choose_splits(cdiv(n, 64), k, block_k, num_sms)
    return QuantTile(64, block_k, splits, 4, 2 if gated and tokens > 32 else 3)


def digits_tile(rows: int, n: int, num_sms: int) -> QuantTile:
    """The tile for int8 weights and MAX_SKINNY_ROWS / 2 to MAX_DIGIT_ROWS rows as digits; it has MAX_SKINNY_ROWS tokens."""
    token_tiles = cdiv(rows, MAX_SKINNY_ROWS)
    if token_tiles * cdiv(n, 128) >= num_sms // 2:
        return QuantTile(128, 128, 1, 8, 4)
    return QuantTile(64, 128, 2 if token_tiles * cdiv(n, 64) < 2 * num_sms else 1, 4, 4)


def digits_take_one_round(rows: int, n: int, num_sms: int) -> bool:
    """Whether all tiles of `digits_tile` run at the same time, so that the quantized kernel is faster than `gemm.large`.

    A round takes as long as one of `gemm.large`, which has about half as many tiles. Llama-3.1-8B's down projection, µs on an H200: 129 and
    256 rows 71 and 72 (96 and 128 tiles), `gemm.large` 80 and 81; 512 rows 137 and 91. Gate and up, three rounds with 129 rows: 125 and 80.
    """
    return rows <= MAX_DIGIT_ROWS and cdiv(rows, MAX_SKINNY_ROWS) * cdiv(n, 128) <= num_sms


def large_tile(tokens: int, item: int, group: int = 0, k: int = 0) -> QuantTile:
    """The tile for so large a number of tokens that arithmetic takes longer than reading the weight.

    `item` is an element's size in bytes.
    """
    block_k = largest_block(k, 2 * group, 2 * group) if group else max(32, 128 // item)
    if item == 4:
        return QuantTile(32, block_k if group else 32, 1, 4, 2)
    return QuantTile(128, block_k, 1, 8, 3) if tokens > 64 else QuantTile(64, block_k, 1, 4, 4)


def largest_block(k: int, unit: int, limit: int) -> int:
    """The largest number unit × 2^i that divides k and is at most `limit`; `unit` if there is none."""
    block = unit
    while block * 2 <= limit and k % (block * 2) == 0:
        block *= 2
    return block
