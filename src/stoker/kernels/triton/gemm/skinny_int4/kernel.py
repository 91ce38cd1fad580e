"""Some tokens against int4 in small groups, read once: each warp of a program has a band of rows, and all of them read the same tokens.

What `stream_kernel` is for eight tokens, with two differences. There warps split the features, so each reads tokens of its own, and at 32
tokens those are several times the weights' bytes; here the first warp that asks brings them into the multiprocessor's cache for the others.
And codes become the tokens' 16-bit dtype in registers, once for all tokens: digits of tokens would have every group's sums joined and
scaled for each of them. (16-bit weights were tried too; tiles in shared memory are faster from nine tokens on.)
"""

# ruff: noqa: RUF005 - Triton's language adds tuples, and does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.activations import row_values
from stoker.kernels.triton.gemm.skinny.kernel import finish, lane_rows, same, take_grid, take_weights
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from stoker.kernels.triton.ptx.mma import dequantize_int4, load_fragment, mma_m16n8

CHUNK_BYTES = tl.constexpr(64)  # of a row, that four lanes read at once
OPERAND = tl.constexpr(512)  # bytes of tokens that a warp reads at once


@triton.jit
def place_of(feature, token, TOKEN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """Where `arrange_kernel` puts a feature of a token: in the order in which lanes take their operands.

    A chunk's 16 bytes of a lane hold 16 features of one group in their low nibbles and 16 of the next one in the high ones, and each word's
    bytes 0 and 2 become one register, 1 and 3 another.
    """
    byte = feature // (2 * GROUP) * GROUP + feature % GROUP
    side = feature // GROUP % 2
    word, at = byte % 16 // 4, byte % 4
    block = byte // CHUNK_BYTES * 2 + side
    lane = token % 8 * 4 + byte % CHUNK_BYTES // 16
    return (((block * TOKEN_TILES + token // 8) * 2 + word // 2) * 32 + lane) * 8 + word % 2 * 4 + at % 2 * 2 + at // 2


@triton.jit
def arrange_kernel(
    x, norm_weight, out, k, padded, stride_x, eps,
    NORM: tl.constexpr, TOKEN_TILES: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, parts of their features), one part where there is an RMS norm. WHOLE: a chunk holds all features."""
    token = tl.program_id(0)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    row = x + token.to(tl.int64) * stride_x
    if WHOLE:
        cols = tl.arange(0, CHUNK)
        v, weighted = row_values(row, norm_weight, cols, k, NORM, GATE)
        if NORM:
            weighted *= tl.rsqrt(tl.sum(v * v, 0) / k + eps)
        tl.store(out + place_of(cols, token, TOKEN_TILES, GROUP), weighted.to(out.dtype.element_ty), mask=cols < padded)
    elif NORM:
        squares = tl.zeros([CHUNK], tl.float32)
        for start in range(0, k, CHUNK):
            v, weighted = row_values(row, norm_weight, start + tl.arange(0, CHUNK), k, NORM, GATE)
            squares += v * v
        factor = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        for start in range(0, padded, CHUNK):
            cols = start + tl.arange(0, CHUNK)
            v, weighted = row_values(row, norm_weight, cols, k, NORM, GATE)
            tl.store(out + place_of(cols, token, TOKEN_TILES, GROUP), (weighted * factor).to(out.dtype.element_ty), mask=cols < padded)
    else:
        cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        v, weighted = row_values(row, norm_weight, cols, k, NORM, GATE)
        tl.store(out + place_of(cols, token, TOKEN_TILES, GROUP), weighted.to(out.dtype.element_ty), mask=cols < padded)


@triton.jit
def add_chunk(acc, words, grid, tokens, XTYPE: tl.constexpr, ZERO: tl.constexpr, M_TILES: tl.constexpr, N_TILES: tl.constexpr):
    """acc + the products of a chunk of each row, whose tokens lie at `tokens`."""
    EACH: tl.constexpr = 1 if ZERO == "none" else 2
    for side in tl.static_range(2):
        given = ()
        for i in tl.static_range(2 * N_TILES):
            given = given + load_fragment(tokens, (2 * N_TILES * side + i) * OPERAND)
        wide = ()
        mine = grid[EACH * 2 * M_TILES * side : EACH * 2 * M_TILES * (side + 1)]
        for i in tl.static_range(2 * M_TILES):
            wide = wide + dequantize_int4(words[4 * i : 4 * i + 4], mine[EACH * i : EACH * (i + 1)], side, XTYPE, ZERO)
        made = ()
        for tile in tl.static_range(M_TILES):
            for column in tl.static_range(N_TILES):
                total = acc[4 * (N_TILES * tile + column) : 4 * (N_TILES * tile + column) + 4]
                for half in tl.static_range(2):
                    upper = wide[16 * tile + 4 * half : 16 * tile + 4 * half + 4]
                    lower = wide[16 * tile + 8 + 4 * half : 16 * tile + 8 + 4 * half + 4]
                    total = mma_m16n8(total, upper, lower, given[8 * column + 4 * half : 8 * column + 4 * half + 4], XTYPE)
                made = made + total
        acc = made
    return acc


@triton.jit
def summed(sums, partial, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """sums + COUNT registers of each thread, as another program left them."""
    made = ()
    for i in tl.static_range(COUNT):
        made = made + (sums[i] + tl.load(partial + i * SIZE + tl.arange(0, SIZE)),)
    return made


@triton.jit(do_not_specialize=["m", "splits"])
def band_kernel(
    x, weight, scale, zero, bias, residual, out, partial, arrived,
    m, n, chunks, splits, stride_w, stride_groups,
    XTYPE: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    M_TILES: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs over rows, splits of the features). A warp has 16 × M_TILES rows, of a GATED weight half gates.

    x 16-bit, as arranged for N_TILES × 8 tokens; weight [n (twice when GATED), stride_w bytes]; scale and zero [groups, rows]. A chunk
    is 64 bytes of a row, of one pair of groups or of some. partial float32 [tiles, splits, sums × threads]; arrived [tiles] counts finished
    splits and is left at zero.
    """
    PART: tl.constexpr = M_TILES // 2 if GATED else M_TILES
    COUNT: tl.constexpr = 2 * M_TILES
    GRID: tl.constexpr = 2 * COUNT * (1 if ZERO == "none" else 2)
    WORDS: tl.constexpr = 4 * COUNT
    SUMS: tl.constexpr = 4 * M_TILES * N_TILES
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    band = tl.program_id(0) * WARPS + thread // 32
    share = tl.cdiv(chunks, splits)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, chunks)
    rows = lane_rows(band, lane, n, M_TILES, GATED)
    places = ()
    for i in tl.static_range(COUNT):
        places = places + (weight.to(tl.int64) + rows[i].to(tl.int64) * stride_w + lane % 4 * 16,)
    PAIRS: tl.constexpr = CHUNK_BYTES // GROUP
    mine = lane % 4 * 16 // GROUP  # the pair of the lane's bytes in a chunk
    nothing = tl.zeros_like(lane)
    words = ()
    grid = ()
    for stage in tl.static_range(STAGES):
        chunk = nothing + (first + stage)
        is_there = chunk < last
        words = words + take_weights(places, chunk, is_there, COUNT, 1)
        grid = grid + take_grid(scale, zero, rows, 2 * (chunk * PAIRS + mine), is_there, stride_groups, ZERO, COUNT, 2)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    tokens = x.to(tl.int64) + lane * 16
    sums = same(nothing.to(tl.float32), SUMS)
    for start in range(first, last, STAGES):
        new_words = ()
        new_grid = ()
        for stage in tl.static_range(STAGES):
            after = nothing + (start + stage + STAGES)
            new_words = new_words + take_weights(places, after, after < last, COUNT, 1)
            new_grid = new_grid + take_grid(scale, zero, rows, 2 * (after * PAIRS + mine), after < last, stride_groups, ZERO, COUNT, 2)
            chunk = nothing + (start + stage)
            at = tokens + tl.minimum(chunk, last - 1).to(tl.int64) * (4 * N_TILES * OPERAND)  # past the end weights are zeros
            sums = add_chunk(
                sums, words[WORDS * stage : WORDS * (stage + 1)], grid[GRID * stage : GRID * (stage + 1)], at,
                XTYPE, ZERO, M_TILES, N_TILES,
            )  # fmt: skip
        words = new_words
        grid = new_grid
    if SPLIT:
        SIZE: tl.constexpr = 32 * WARPS
        unit = tl.program_id(0)
        whole = partial + (unit * splits).to(tl.int64) * (SUMS * SIZE)
        for i in tl.static_range(SUMS):
            tl.store(whole + tl.program_id(1) * (SUMS * SIZE) + i * SIZE + thread, sums[i])
        tl.debug_barrier()
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel", scope="gpu") != splits - 1:
            return
        tl.store(arrived + unit, 0)
        sums = same(nothing.to(tl.float32), SUMS)
        for other in range(splits):
            sums = summed(sums, whole + other * (SUMS * SIZE), SUMS, SIZE)
    for tile in tl.static_range(PART):
        for column in tl.static_range(N_TILES):
            for i in tl.static_range(4):
                row = (band * PART + tile) * 16 + i // 2 * 8 + lane // 4
                columns = column * 8 + lane % 4 * 2 + i % 2
                up = sums[4 * (N_TILES * (tile + PART if GATED else tile) + column) + i]
                finish(
                    sums[4 * (N_TILES * tile + column) + i], up, row, columns, m, scale, None, bias, residual, out, n, GATED, ACT, False,
                )  # fmt: skip
