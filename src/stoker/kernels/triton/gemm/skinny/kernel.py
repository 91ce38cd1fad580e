"""Few tokens against weights that are read once, in the order in which they lie: from memory into the registers that are multiplied.

Warps of a program take turns at chunks of some rows (64 bytes; of int4 whole pairs of groups); each has asked for the chunks of its next
STAGES turns, and for the first ones before the kernel before this one has ended. Their sums meet at the end, first those of a program's
warps, then those of programs that split the features.
FORM: int4 (paired groups, see `quant_int4`) and bytes (int8), against tokens' digits (see `quant_codes`); fp8, against e4m3 tokens.
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.activation import activated
from stoker.kernels.triton.gemm.quantized.kernel import grid_of, stored_grid
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from stoker.kernels.triton.ptx.mma import e4m3_to_f16, load_token_fragment, load_weight_fragment, mma_m16n8
from stoker.kernels.triton.ptx.unpack import unpack_int4


@triton.jit
def same(value, COUNT: tl.constexpr):
    """COUNT times the same."""
    made = ()
    for _ in tl.static_range(COUNT):
        made = made + (value,)
    return made


@triton.jit
def lane_rows(tile, lane, n, M_TILES: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows that a lane holds, two for each of M_TILES; gated ones follow the gates."""
    PART: tl.constexpr = M_TILES // 2 if GATED else M_TILES
    rows = ()
    for half in tl.static_range(2 * M_TILES):
        row = tl.minimum(tile * (16 * PART) + 8 * (half % (2 * PART)) + lane // 4, n - 1)
        rows = rows + (row + n * (half // (2 * PART)),)
    return rows


@triton.jit
def take_weights(places, chunk, is_there, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """16 bytes of each row for each 64 of a chunk. The rows' first ones lie at `places`."""
    made = ()
    for part in tl.static_range(PARTS):
        for i in tl.static_range(COUNT):
            made = made + load_weight_fragment(places[i] + chunk.to(tl.int64) * (64 * PARTS), is_there.to(tl.int32), part * 64)
    return made


@triton.jit
def take_grid(scale, zero, rows, group, is_there, stride_groups, ZERO: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """The scales of each row's next GROUPS groups of int4, and what stands for their zeros."""
    made = ()
    for later in tl.static_range(GROUPS):
        first = (group + later).to(tl.int64) * stride_groups
        for i in tl.static_range(COUNT):
            made = made + (tl.load(scale + first + rows[i], mask=is_there, other=0, volatile=True),)
            if ZERO != "none":
                made = made + (tl.load(zero + first + rows[i], mask=is_there, other=0, volatile=True),)
    return made


@triton.jit
def group_sums(sums, group, is_there, lane, m, column, N_TILES: tl.constexpr):
    """The sum of a group's features of the token that a lane's sums are of, in units of fine digits, for each tile of tokens."""
    made = ()
    for tile in tl.static_range(N_TILES):
        place = sums + group * m + tl.minimum(column + 4 * tile + lane % 4, m - 1)
        made = made + (tl.load(place, mask=is_there, other=0.0),)
    return made


@triton.jit
def add_group(acc, raw, total, grid, GROUP: tl.constexpr, M_TILES: tl.constexpr, N_TILES: tl.constexpr, ZERO: tl.constexpr):
    """acc + (a group's sums - zero × the tokens' `total`) × scale, by row. Of four sums two are a row's coarse and fine ones.

    GROUP: its number in the chunk.
    """
    EACH: tl.constexpr = 1 if ZERO == "none" else 2
    made = ()
    for tile in tl.static_range(M_TILES):
        for column in tl.static_range(N_TILES):
            for half in tl.static_range(2):
                digits = raw[4 * (N_TILES * tile + column) + 2 * half] * 254 + raw[4 * (N_TILES * tile + column) + 2 * half + 1]
                value = digits.to(tl.float32)
                s = grid[EACH * (2 * M_TILES * GROUP + 2 * tile + half)].to(tl.float32)
                before = acc[2 * (N_TILES * tile + column) + half]
                if ZERO == "none":
                    value -= 8.0 * total[column]
                elif ZERO == "int":
                    value -= grid[EACH * (2 * M_TILES * GROUP + 2 * tile + half) + 1].to(tl.float32) * total[column]
                else:
                    before += grid[EACH * (2 * M_TILES * GROUP + 2 * tile + half) + 1].to(tl.float32) * total[column]
                made = made + (before + s * value,)
    return made


@triton.jit
def products(acc, words, given, KIND: tl.constexpr, EACH: tl.constexpr, M_TILES: tl.constexpr, N_TILES: tl.constexpr):
    """acc + the products of 64 bytes of each row. EACH: registers of a tile of tokens in `given`."""
    made = ()
    for tile in tl.static_range(M_TILES):
        for column in tl.static_range(N_TILES):
            made = made + mma_m16n8(
                acc[4 * (N_TILES * tile + column) : 4 * (N_TILES * tile + column) + 4], words[8 * tile : 8 * tile + 4],
                words[8 * tile + 4 : 8 * tile + 8], given[EACH * column : EACH * column + EACH], KIND,
            )  # fmt: skip
    return made


@triton.jit
def take_tokens(tokens, offset, is_there, FORM: tl.constexpr, N_TILES: tl.constexpr):
    """The operands of each tile of tokens, `offset` bytes on."""
    made = ()
    for tile in tl.static_range(N_TILES):
        given = load_token_fragment(tokens[tile] + offset.to(tl.int64), is_there.to(tl.int32))
        if FORM == "fp8":
            given = e4m3_to_f16(given)
        made = made + given
    return made


@triton.jit
def of_pair(given, lane, PAIR: tl.constexpr, GROUP: tl.constexpr):
    """Tokens' operands where several lanes' 16 bytes are of several pairs of groups: zeros in the lanes of the others."""
    made = ()
    for i in tl.static_range(len(given)):
        made = made + (tl.where(lane % 4 * 16 // GROUP == PAIR, given[i], 0),)
    return made


@triton.jit
def add_chunk(
    acc, words, grid, tokens, sums, chunk, is_there, lane, m, column,
    FORM: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, M_TILES: tl.constexpr, N_TILES: tl.constexpr,
):  # fmt: skip
    """acc + a chunk's products: four registers a tile, of int4 two, with the digits joined."""
    if FORM == "int4":
        PAIRS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
        for side in tl.static_range(2):  # low nibbles are one group, high ones the next
            for pair in tl.static_range(PAIRS):
                raw = same(tl.zeros_like(lane), 4 * M_TILES * N_TILES)
                for part in tl.static_range(GROUP // 64 if GROUP > 64 else 1):
                    given = take_tokens(tokens, chunk * (2 * GROUP * PAIRS) + side * GROUP + part * 64, is_there, FORM, N_TILES)
                    if PAIRS > 1:
                        given = of_pair(given, lane, pair, GROUP)
                    mine = words[8 * M_TILES * part : 8 * M_TILES * (part + 1)]
                    raw = products(raw, mine, given, "low" if side == 0 else "high", 4, M_TILES, N_TILES)
                total = group_sums(sums, 2 * (chunk * PAIRS + pair) + side, is_there, lane, m, column, N_TILES)
                acc = add_group(acc, raw, total, grid, 2 * pair + side, M_TILES, N_TILES, ZERO)
        return acc
    else:
        given = take_tokens(tokens, chunk * 64, is_there, FORM, N_TILES)
        return products(acc, words, given, "e4m3" if FORM == "fp8" else "bytes", 8 if FORM == "fp8" else 4, M_TILES, N_TILES)


@triton.jit
def joined(values, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """float32 [32, COUNT] of COUNT registers a thread: the sums over warps."""
    level = values
    LEVELS: tl.constexpr = COUNT.bit_length() - 1
    for up in tl.static_range(LEVELS):
        made = ()
        for i in tl.static_range(COUNT >> (up + 1)):
            made = made + (tl.join(level[i], level[i + (COUNT >> (up + 1))]),)
        level = made
    return tl.sum(tl.reshape(level[0], (WARPS, 32, COUNT)), 0)


@triton.jit
def plain_sums(
    x, weight, scale, zero, rows, tokens, begin, end, m, stride_x, stride_w, stride_groups,
    FORM: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What the sums of a tile's lanes come to, [rows, tokens], for the interpreter. `begin` and `end` count 64 bytes of a row."""
    acc = tl.zeros([rows.shape[0], tokens.shape[0]], tl.float32)
    DIGITS: tl.constexpr = 2 if FORM == "int4" or FORM == "bytes" else 1
    for chunk in range(begin, end):
        at = chunk * 64 + tl.arange(0, 64)
        byte = weight + rows[:, None].to(tl.int64) * stride_w + at[None, :]
        for side in tl.static_range(2 if FORM == "int4" else 1):
            group = 2 * (at // GROUP) + side
            cols = group * GROUP + at % GROUP if FORM == "int4" else at
            v = tl.zeros([64, tokens.shape[0]], tl.float32)
            for digit in tl.static_range(DIGITS):
                part = tl.load(x + (digit * m + tokens)[None, :] * stride_x + cols[:, None]).to(tl.float32)
                v = v * 254.0 + part
            if FORM == "int4":
                low, high = unpack_int4(tl.load(byte), PACKED)
                s, offset = grid_of(stored_grid(scale, zero, group[None, :] * stride_groups + rows[:, None], ZERO), ZERO)
                w = (low if side == 0 else high).to(tl.float32) * s + offset
            else:
                w = tl.load(byte).to(tl.float32)
            acc += tl.dot(w, v, input_precision="ieee")
    return acc


@triton.jit
def finish(y, up, rows, columns, m, scale, row_scale, bias, residual, out, n, GATED: tl.constexpr, ACT: tl.constexpr, BY_ROW: tl.constexpr):
    """From sums to the output: scales, bias, activation, residual. All of one shape: element (row of the weight, row of x)."""
    kept = rows < n
    inside = kept & (columns < m)
    if row_scale is not None:
        step = tl.load(row_scale + columns, mask=inside, other=0.0)
        y *= step
        if GATED:
            up *= step
    if BY_ROW:
        y *= tl.load(scale + rows, mask=kept, other=0.0)
        if GATED:
            up *= tl.load(scale + n + rows, mask=kept, other=0.0)
    if bias is not None:
        y += tl.load(bias + rows, mask=kept, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + n + rows, mask=kept, other=0.0).to(tl.float32)
    if GATED:
        y = activated(y, ACT) * up
    place = columns.to(tl.int64) * n + rows
    if residual is not None:
        y += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def joined_digits(sums, COUNT: tl.constexpr):
    """COUNT float32 registers of twice as many int32 ones: neighbours are a token's coarse and fine digits' sums."""
    made = ()
    for i in tl.static_range(COUNT):
        made = made + (sums[2 * i].to(tl.float32) * 254.0 + sums[2 * i + 1].to(tl.float32),)
    return made


@triton.jit(do_not_specialize=["m", "splits"])
def stream_kernel(
    x, row_scale, x_sums, weight, scale, zero, bias, residual, out, partial, arrived,
    m, n, chunks, splits, stride_x, stride_w, stride_groups,
    FORM: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    M_TILES: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    PACKED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, splits, tiles of tokens). A tile is 16 × M_TILES rows of the weight, of a GATED one half of them gates.

    x [m, k] e4m3, or int8 digits [2 × m, k]; row_scale float32 [m]; x_sums float32 [groups, m] (int4). weight [n (twice when
    GATED), stride_w bytes]; scale float32 [rows], or of int4 [groups, rows] with `zero` alike.
    partial float32 [tiles, splits, sums of a tile]; arrived [tiles] counts finished splits and is left at zero.
    """
    PART: tl.constexpr = M_TILES // 2 if GATED else M_TILES
    PARTS: tl.constexpr = 2 if GATED else 1
    DIGITS: tl.constexpr = 2 if FORM == "int4" or FORM == "bytes" else 1
    TOKENS: tl.constexpr = 8 * N_TILES // DIGITS
    PIECES: tl.constexpr = GROUP // 64 if FORM == "int4" and GROUP > 64 else 1  # of 64 bytes in a chunk
    PAIRS: tl.constexpr = 64 // GROUP if FORM == "int4" and GROUP < 64 else 1  # of groups in a chunk
    tile = tl.program_id(0)
    split = tl.program_id(1)
    column = tl.program_id(2) * TOKENS
    turns = tl.cdiv(tl.cdiv(chunks, WARPS), splits)
    first = split * turns
    last = tl.minimum(tl.cdiv(chunks, WARPS), first + turns)
    if PACKED:
        COUNT: tl.constexpr = 2 * M_TILES
        GRID: tl.constexpr = 0 if FORM != "int4" else 2 * PAIRS * COUNT * (1 if ZERO == "none" else 2)
        thread = tl.arange(0, 32 * WARPS)
        lane = thread % 32
        warp = thread // 32
        rows = lane_rows(tile, lane, n, M_TILES, GATED)
        places = ()
        for i in tl.static_range(COUNT):
            places = places + (weight.to(tl.int64) + rows[i].to(tl.int64) * stride_w + lane % 4 * 16,)
        words = ()
        grid = ()
        for stage in tl.static_range(STAGES):
            chunk = (first + stage) * WARPS + warp
            is_there = (chunk < chunks) & (first + stage < last)
            words = words + take_weights(places, chunk, is_there, COUNT, PIECES)
            if FORM == "int4":
                grid = grid + take_grid(scale, zero, rows, chunk * (2 * PAIRS), is_there, stride_groups, ZERO, COUNT, 2 * PAIRS)
        pdl_wait(USE_PDL)
        pdl_launch_dependents(USE_PDL)
        tokens = ()
        feature = lane % 4 * 16  # the lane's first one in a chunk
        if PAIRS > 1:
            feature = feature // GROUP * (2 * GROUP) + feature % GROUP
        for i in tl.static_range(N_TILES):
            token = tl.minimum(column + (8 * i + lane // 4) // DIGITS, m - 1) + (lane // 4) % DIGITS * m
            tokens = tokens + (x.to(tl.int64) + token.to(tl.int64) * stride_x + feature,)
        nothing = tl.zeros_like(lane)
        if FORM == "int4":
            sums = same(nothing.to(tl.float32), 2 * M_TILES * N_TILES)
        elif FORM == "bytes":
            sums = same(nothing, 4 * M_TILES * N_TILES)
        else:
            sums = same(nothing.to(tl.float32), 4 * M_TILES * N_TILES)
        for start in range(first, last, STAGES):
            new_words = ()
            new_grid = ()
            for stage in tl.static_range(STAGES):
                chunk = (start + stage) * WARPS + warp
                is_there = (chunk < chunks) & (start + stage < last)
                sums = add_chunk(
                    sums, words[4 * COUNT * PIECES * stage : 4 * COUNT * PIECES * (stage + 1)], grid[GRID * stage : GRID * (stage + 1)],
                    tokens, x_sums, chunk, is_there, lane, m, column, FORM, ZERO, GROUP, M_TILES, N_TILES,
                )  # fmt: skip
                after = chunk + STAGES * WARPS
                is_there = (after < chunks) & (start + stage + STAGES < last)
                new_words = new_words + take_weights(places, after, is_there, COUNT, PIECES)
                if FORM == "int4":
                    new_grid = new_grid + take_grid(scale, zero, rows, after * (2 * PAIRS), is_there, stride_groups, ZERO, COUNT, 2 * PAIRS)
            words = new_words
            grid = new_grid
        if FORM == "bytes":
            sums = joined_digits(sums, 2 * M_TILES * N_TILES)
        EACH: tl.constexpr = 4 // DIGITS  # sums of an m-tile and a tile of tokens
        HALF: tl.constexpr = EACH // 2
        ALL: tl.constexpr = EACH * PART * N_TILES
        at_lane = tl.arange(0, 32)[:, None]
        at_sum = tl.arange(0, ALL)[None, :]
        row = tile * (16 * PART) + at_sum // (EACH * N_TILES) * 16 + at_sum % EACH // HALF * 8 + at_lane // 4
        columns = column + at_sum // EACH % N_TILES * (8 // DIGITS) + at_lane % 4 * HALF + at_sum % HALF
        place = at_lane * ALL + at_sum
        SIZE: tl.constexpr = 32 * ALL
        y = joined(sums[0:ALL], ALL, WARPS)
        up = y
        if GATED:
            up = joined(sums[ALL : 2 * ALL], ALL, WARPS)
    else:
        at_row = tl.arange(0, 16 * PART)
        at_token = tl.arange(0, TOKENS)
        columns = column + at_token[None, :] + tl.zeros_like(at_row)[:, None]
        row = tile * (16 * PART) + at_row[:, None] + tl.zeros_like(columns)
        place = at_row[:, None] * TOKENS + at_token[None, :]
        SIZE: tl.constexpr = 16 * PART * TOKENS
        known = tl.minimum(column + at_token, m - 1)
        safe = tl.minimum(tile * (16 * PART) + at_row, n - 1)
        begin = first * WARPS * PIECES
        end = tl.minimum(last * WARPS, chunks) * PIECES
        y = plain_sums(x, weight, scale, zero, safe, known, begin, end, m, stride_x, stride_w, stride_groups, FORM, ZERO, GROUP, PACKED)
        up = y
        if GATED:
            up = plain_sums(
                x, weight, scale, zero, safe + n, known, begin, end, m, stride_x, stride_w, stride_groups, FORM, ZERO, GROUP,
                PACKED,
            )  # fmt: skip
    if SPLIT:
        unit = tl.program_id(2) * tl.num_programs(0) + tile
        mine = partial + (unit * splits + split).to(tl.int64) * (PARTS * SIZE)
        tl.store(mine + place, y, mask=columns < m)
        if GATED:
            tl.store(mine + SIZE + place, up, mask=columns < m)
        tl.debug_barrier()
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel", scope="gpu") != splits - 1:
            return
        tl.store(arrived + unit, 0)
        y = tl.zeros_like(y)
        up = y
        for other in range(splits):
            theirs = partial + (unit * splits + other).to(tl.int64) * (PARTS * SIZE)
            y += tl.load(theirs + place, mask=columns < m, other=0.0)
            if GATED:
                up += tl.load(theirs + SIZE + place, mask=columns < m, other=0.0)
    BY_ROW: tl.constexpr = FORM == "bytes" or FORM == "fp8"
    finish(y, up, row, columns, m, scale, row_scale, bias, residual, out, n, GATED, ACT, BY_ROW)
