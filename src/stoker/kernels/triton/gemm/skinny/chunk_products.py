"""Products of one chunk of a 16-row tile's weights with the tokens' quantized values, in register fragments.

Columns of the product (B and C fragments of `ptx.mma`, tiles of 8): an fp8 token is one column. A token of two int8 digits is two
neighbouring columns, coarse and fine, whose sums one lane holds side by side:

    lane l, c = l % 4       fp8                            digits
      c0, c1 (row g)        tokens 2c, 2c + 1              token c: sums of coarse, of fine digits     token's sum = 254 × c0 + c1
      c2, c3 (row g + 8)    tokens 2c, 2c + 1              token c                                                   254 × c2 + c3

int4: of the two groups of a pair, byte i holds value i of the first group in its low nibble, of the second in its high one. With groups of
32 features a chunk of 64 bytes holds two pairs: lanes with c = 0, 1 load the first, those with c = 2, 3 the second. Each pair is multiplied
by tokens that are zeroed in the other pair's lanes, so that each group has sums of its own.

    lane c           0            1            2            3
    groups of 64     groups 0, 1 (low, high nibbles) ..........
    groups of 32     groups 0, 1 .........     groups 2, 3 ....
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.ptx.mma import e4m3_to_f16, load_token_fragment, mma_m16n8
from stoker.kernels.triton.ptx.registers import repeat


@triton.jit
def add_chunk(
    acc,  # tuple of registers: fp8, int8 4 per 16 × 8 tile (c0 … c3); int4 float32, 2 per tile (digits joined)
    words,  # registers of the chunk, from `load_weights`
    scales_zeros,  # int4: from `load_scales`
    addresses,  # of each column tile: the lane's column of the tokens
    activations,  # QuantizedTokens
    chunk,  # index of the chunk
    is_valid,  # False past the last chunk
    lane,
    num_tokens,
    first_token,  # of the CTA
    FORMAT: tl.constexpr,  # WeightFormat
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
):
    """acc + the products of one chunk: `words` are the weights' A fragments, `addresses` the tokens' addresses per column tile.

    `scales_zeros` are the chunk's scales and zeros (int4); `activations`: QuantizedTokens; `chunk`: index of the chunk.
    """
    FORM: tl.constexpr = FORMAT.form
    ZERO: tl.constexpr = FORMAT.zero
    GROUP: tl.constexpr = FORMAT.group
    if FORM == "int4":
        PAIRS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
        PARTS: tl.constexpr = GROUP // 64 if GROUP > 64 else 1
        for side in tl.static_range(2):  # low nibbles are one group, high ones the next
            for pair in tl.static_range(PAIRS):
                sums = repeat(tl.zeros_like(lane), 4 * ROW_TILES * COLUMN_TILES)
                for part in tl.static_range(PARTS):
                    tokens = load_tokens(addresses, chunk * (2 * GROUP * PAIRS) + side * GROUP + part * 64, is_valid, FORM, COLUMN_TILES)
                    if PAIRS > 1:
                        tokens = select_pair(tokens, lane, pair, GROUP)
                    part_words = words[8 * ROW_TILES * part : 8 * ROW_TILES * (part + 1)]
                    sums = add_products(sums, part_words, tokens, "low" if side == 0 else "high", 4, ROW_TILES, COLUMN_TILES)
                token_sums = load_group_sums(
                    activations, 2 * (chunk * PAIRS + pair) + side, is_valid, lane, num_tokens, first_token, COLUMN_TILES
                )
                acc = add_group(acc, sums, token_sums, scales_zeros, 2 * pair + side, ROW_TILES, COLUMN_TILES, ZERO)
        return acc
    else:
        KIND: tl.constexpr = "e4m3" if FORM == "fp8" else "bytes"
        tokens = load_tokens(addresses, chunk * 64, is_valid, FORM, COLUMN_TILES)
        return add_products(acc, words, tokens, KIND, 8 if FORM == "fp8" else 4, ROW_TILES, COLUMN_TILES)


@triton.jit
def load_tokens(addresses, offset, is_valid, FORM: tl.constexpr, COLUMN_TILES: tl.constexpr):
    """The B fragments of each column tile, loaded `offset` bytes after `addresses`. 4 registers per tile, 8 for fp8 (as float16)."""
    tokens = ()
    for tile in tl.static_range(COLUMN_TILES):
        fragment = load_token_fragment(addresses[tile] + offset.to(tl.int64), is_valid.to(tl.int32))
        if FORM == "fp8":
            fragment = e4m3_to_f16(fragment)
        tokens = tokens + fragment
    return tokens


@triton.jit
def select_pair(tokens, lane, PAIR: tl.constexpr, GROUP: tl.constexpr):
    """`tokens` with zeros in the lanes whose 16 bytes of weights belong to another pair of groups than PAIR."""
    selected = ()
    for i in tl.static_range(len(tokens)):
        selected = selected + (tl.where(lane % 4 * 16 // GROUP == PAIR, tokens[i], 0),)
    return selected


@triton.jit
def add_products(acc, words, tokens, KIND: tl.constexpr, REGISTERS: tl.constexpr, ROW_TILES: tl.constexpr, COLUMN_TILES: tl.constexpr):
    """acc + the products of 64 bytes of each row. `tokens` has REGISTERS registers per column tile."""
    sums = ()
    for tile in tl.static_range(ROW_TILES):
        for column in tl.static_range(COLUMN_TILES):
            sums = (
                sums
                + mma_m16n8(
                    acc[4 * (COLUMN_TILES * tile + column) : 4 * (COLUMN_TILES * tile + column + 1)],
                    words[8 * tile : 8 * tile + 4],  # row g
                    words[8 * tile + 4 : 8 * tile + 8],  # row g + 8
                    tokens[REGISTERS * column : REGISTERS * (column + 1)],
                    KIND,
                )
            )
    return sums


@triton.jit
def load_group_sums(activations, group, is_valid, lane, num_tokens, first_token, COLUMN_TILES: tl.constexpr):
    """A float32 register per column tile: Σ q over group number `group`, of the lane's token in that tile; 0 unless `is_valid`.

    q = 254 × coarse + fine are the token's integers (`gemm.quantized.activations`); a zero point is multiplied by their sum. `activations`:
    QuantizedTokens; `first_token`: the first token of column tile 0.
    """
    token_sums = ()
    for tile in tl.static_range(COLUMN_TILES):
        address = activations.sums_ptr + group * num_tokens + tl.minimum(first_token + 4 * tile + lane % 4, num_tokens - 1)
        token_sums = token_sums + (tl.load(address, mask=is_valid, other=0.0),)
    return token_sums


@triton.jit
def add_group(
    acc,
    sums,  # int32, 4 per tile: products with stored values q
    token_sums,  # float32, one per column tile, from `load_group_sums`
    scales_zeros,
    GROUP_INDEX: tl.constexpr,  # of the group within its chunk
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    ZERO: tl.constexpr,
):
    """acc + Σ w × x over one group. With w = (q - zero) × scale this is (Σ q × x - zero × Σ x) × scale.

    `sums`: the integer products Σ q × x; `token_sums`: Σ x from `load_group_sums`.
    """
    STEP: tl.constexpr = 1 if ZERO == "none" else 2  # scale, or scale and zero
    result = ()
    for tile in tl.static_range(ROW_TILES):
        for column in tl.static_range(COLUMN_TILES):
            for half in tl.static_range(2):  # rows g and g + 8
                coarse = sums[4 * (COLUMN_TILES * tile + column) + 2 * half]
                digits = coarse * 254 + sums[4 * (COLUMN_TILES * tile + column) + 2 * half + 1]
                value = digits.to(tl.float32)
                scale = scales_zeros[STEP * (2 * ROW_TILES * GROUP_INDEX + 2 * tile + half)].to(tl.float32)
                before = acc[2 * (COLUMN_TILES * tile + column) + half]
                if ZERO == "none":
                    value -= 8.0 * token_sums[column]
                elif ZERO == "int":
                    value -= scales_zeros[STEP * (2 * ROW_TILES * GROUP_INDEX + 2 * tile + half) + 1].to(tl.float32) * token_sums[column]
                else:
                    before += scales_zeros[STEP * (2 * ROW_TILES * GROUP_INDEX + 2 * tile + half) + 1].to(tl.float32) * token_sums[column]
                result = result + (before + scale * value,)
    return result


@triton.jit
def combine_digits(sums, COUNT: tl.constexpr):
    """COUNT float32 registers 254 × coarse + fine, from 2 × COUNT int32 registers: the sums of the coarse and fine digits alternate."""
    joined = ()
    for i in tl.static_range(COUNT):
        joined = joined + (sums[2 * i].to(tl.float32) * 254.0 + sums[2 * i + 1].to(tl.float32),)
    return joined
