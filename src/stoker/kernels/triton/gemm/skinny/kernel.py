"""Skinny GEMM for 1 to 8 tokens against weights of 4 or 8 bits, which go from memory into matrix operands without shared memory.

    out[t, r] = Σ_k x[t, k] × w[r, k]                                   r < n
    out[t, r] = act(Σ_k x[t, k] × w[r, k]) × Σ_k x[t, k] × w[n + r, k]  (gated)            + bias, + residual

    x     [m, k]: e4m3, or two int8 digits (254 × coarse + fine), with a scale per token
    w     [rows, k]: e4m3 or int8 with a scale per row; int4 with scales per row and group of 32 features or more

Grid: (tiles of 16 × row_tiles weight rows, splits of the reduction dimension, tiles of tokens). The warps of a CTA share the reduction
dimension of its rows: in each iteration a warp loads the next chunk of all rows, 64 bytes of each (int4: those of whole pairs of groups).

    chunks of a row    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | ...        4 warps
    warp               | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |
    iteration          |       0       |       1       |            num_stages iterations are loaded ahead, into registers

The loads of the first num_stages iterations are issued before `griddepcontrol.wait`, so they overlap the end of the previous kernel. At the
end the sums of the warps are added through shared memory, then those of the splits through global memory.

Layouts: weights of a lane in `fragments`, columns of the product and pairs of int4 groups in `chunk_products`.

Theoretical floor: the bytes of the weight ÷ 4.42 TB/s (the read bandwidth of an H200). Llama-3.1-8B, µs of qkv, out, up (gated), down, head
with their norms and quantization (benchmarks/results/h200_skinny_tiles.json):

    | weights, tokens          | this kernel                      | of the floor, %     | through shared memory (`gemm.quantized`) |
    | int4 groups of 128, 1    |  7.5,  6.1, 25.7, 13.7,  74.3    | 39, 32, 53, 50, 82  | 11.8,  8.9, 28.3, 22.4,  89.3            |
    | int4 groups of 128, 8    | 10.0,  7.6, 29.7, 18.4, 101.8    | 29, 26, 46, 37, 60  | 11.4, 10.1, 36.0, 19.4,  92.9            |
    | int8, 1                  | 10.2,  7.5, 31.6, 18.3, 123.8    | 56, 51, 84, 72, 96  | 11.5,  9.0, 33.4, 24.5, 124.3            |
    | fp8, 8                   | 10.4,  8.4, 32.3, 19.8, 125.5    | 55, 45, 82, 67, 95  | 10.4,  8.5, 32.1, 20.0, 125.1            |
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.skinny.chunk_products import add_chunk, combine_digits
from stoker.kernels.triton.gemm.skinny.epilogue import is_last_split, store_outputs
from stoker.kernels.triton.gemm.skinny.fragments import lane_rows, load_scales, load_weights, row_addresses
from stoker.kernels.triton.gemm.skinny.interpreted import dequantized_products
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from stoker.kernels.triton.ptx.registers import repeat


@triton.jit
def multiply(
    x,  # QuantizedTokens
    weight,  # QuantizedWeight
    m,
    n,
    num_chunks,
    tile,  # of the CTA
    first_token,  # of the CTA
    first,  # iterations of the CTA
    last,
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    GATED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The products of the CTA's rows and tokens over the chunks that each warp multiplies in iterations first : last.

    Returns a tuple of float32 registers per 16-row tile and column tile: c0 … c3 (fp8), or the sums of rows g and g + 8 (digits).
    """
    FORM: tl.constexpr = FORMAT.form
    ZERO: tl.constexpr = FORMAT.zero
    GROUP: tl.constexpr = FORMAT.group
    ROW_TILES: tl.constexpr = TILE.row_tiles
    COLUMN_TILES: tl.constexpr = TILE.column_tiles
    WARPS: tl.constexpr = TILE.num_warps
    STAGES: tl.constexpr = TILE.num_stages
    DIGITS: tl.constexpr = 1 if FORM == "fp8" else 2
    PARTS: tl.constexpr = GROUP // 64 if FORM == "int4" and GROUP > 64 else 1  # 64-byte parts of a chunk
    PAIRS: tl.constexpr = 64 // GROUP if FORM == "int4" and GROUP < 64 else 1  # pairs of groups in a chunk
    ROWS: tl.constexpr = 2 * ROW_TILES  # rows of a lane
    WORDS: tl.constexpr = 4 * ROWS * PARTS  # registers of a chunk
    SCALES: tl.constexpr = 0 if FORM != "int4" else 2 * PAIRS * ROWS * (1 if ZERO == "none" else 2)
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    warp = thread // 32
    rows = lane_rows(tile, lane, n, ROW_TILES, GATED)
    weight_addresses = row_addresses(weight, rows, lane, ROWS)
    words = ()
    scales_zeros = ()
    for stage in tl.static_range(STAGES):
        chunk = (first + stage) * WARPS + warp
        is_valid = (chunk < num_chunks) & (first + stage < last)
        words = words + load_weights(weight_addresses, chunk, is_valid, ROWS, PARTS)
        if FORM == "int4":
            scales_zeros = scales_zeros + load_scales(weight, rows, chunk * (2 * PAIRS), is_valid, ZERO, ROWS, 2 * PAIRS)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    token_addresses = ()
    feature = lane % 4 * 16  # the lane's first feature in a chunk
    if PAIRS > 1:
        feature = feature // GROUP * (2 * GROUP) + feature % GROUP
    for i in tl.static_range(COLUMN_TILES):
        row = tl.minimum(first_token + (8 * i + lane // 4) // DIGITS, m - 1) + (lane // 4) % DIGITS * m
        token_addresses = token_addresses + (x.values_ptr.to(tl.int64) + row.to(tl.int64) * x.stride_row + feature,)
    zero = tl.zeros_like(lane)
    if FORM == "int4":
        sums = repeat(zero.to(tl.float32), 2 * ROW_TILES * COLUMN_TILES)
    elif FORM == "int8":
        sums = repeat(zero, 4 * ROW_TILES * COLUMN_TILES)
    else:
        sums = repeat(zero.to(tl.float32), 4 * ROW_TILES * COLUMN_TILES)
    for start in range(first, last, STAGES):
        next_words = ()
        next_scales_zeros = ()
        for stage in tl.static_range(STAGES):
            chunk = (start + stage) * WARPS + warp
            is_valid = (chunk < num_chunks) & (start + stage < last)
            sums = add_chunk(
                sums,
                words[WORDS * stage : WORDS * (stage + 1)],
                scales_zeros[SCALES * stage : SCALES * (stage + 1)],
                token_addresses,
                x,
                chunk,
                is_valid,
                lane,
                m,
                first_token,
                FORMAT,
                ROW_TILES,
                COLUMN_TILES,
            )
            later = chunk + STAGES * WARPS
            is_valid = (later < num_chunks) & (start + stage + STAGES < last)
            next_words = next_words + load_weights(weight_addresses, later, is_valid, ROWS, PARTS)
            if FORM == "int4":
                next_scales_zeros = next_scales_zeros + load_scales(weight, rows, later * (2 * PAIRS), is_valid, ZERO, ROWS, 2 * PAIRS)
        words = next_words
        scales_zeros = next_scales_zeros
    if FORM == "int8":
        sums = combine_digits(sums, 2 * ROW_TILES * COLUMN_TILES)
    return sums


@triton.jit
def sum_over_warps(registers, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """float32 [32 lanes, COUNT]: COUNT registers (a power of two) of each thread, summed over the warps."""
    level = registers
    LEVELS: tl.constexpr = COUNT.bit_length() - 1
    for i in tl.static_range(LEVELS):
        joined = ()
        for j in tl.static_range(COUNT >> (i + 1)):
            joined = joined + (tl.join(level[j], level[j + (COUNT >> (i + 1))]),)
        level = joined
    return tl.sum(tl.reshape(level[0], (WARPS, 32, COUNT)), 0)


@triton.jit(do_not_specialize=["m", "splits"])
def skinny_gemm_kernel(
    # Groups of pointers and strides
    x,  # QuantizedTokens
    weight,  # QuantizedWeight
    epilogue,  # Epilogue
    scratch,  # SplitKScratch: of a tile its sums of all lanes; gated, first those of the gates
    # Sizes
    m,  # tokens
    n,  # output features
    num_chunks,  # of a weight row
    splits,
    # Constants
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IN_REGISTERS: tl.constexpr,  # True on a GPU; False in the interpreter, which has no matrix instructions: `dequantized_products`
    USE_PDL: tl.constexpr,
):
    """One CTA: a tile of weight rows × tokens over one split of the reduction dimension, stored or combined with the other splits."""
    FORM: tl.constexpr = FORMAT.form
    WARPS: tl.constexpr = TILE.num_warps
    SPLIT: tl.constexpr = TILE.is_split
    COLUMN_TILES: tl.constexpr = TILE.column_tiles
    OUT_TILES: tl.constexpr = TILE.row_tiles // 2 if GATED else TILE.row_tiles  # 16-row tiles of outputs
    HALVES: tl.constexpr = 2 if GATED else 1  # sums per output
    DIGITS: tl.constexpr = 1 if FORM == "fp8" else 2
    TOKENS: tl.constexpr = 8 * COLUMN_TILES // DIGITS  # of a CTA
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_token = tl.program_id(2) * TOKENS
    split_iterations = tl.cdiv(tl.cdiv(num_chunks, WARPS), splits)
    first = split * split_iterations
    last = tl.minimum(tl.cdiv(num_chunks, WARPS), first + split_iterations)
    if IN_REGISTERS:
        sums = multiply(x, weight, m, n, num_chunks, tile, first_token, first, last, FORMAT, TILE, GATED, USE_PDL)
        REGISTERS: tl.constexpr = 4 // DIGITS  # of a 16-row tile and a column tile
        HALF: tl.constexpr = REGISTERS // 2
        COUNT: tl.constexpr = REGISTERS * OUT_TILES * COLUMN_TILES
        lane = tl.arange(0, 32)[:, None]
        index = tl.arange(0, COUNT)[None, :]
        # Row and token of each register of each lane, both [32, COUNT].
        rows = tile * (16 * OUT_TILES) + index // (REGISTERS * COLUMN_TILES) * 16 + index % REGISTERS // HALF * 8 + lane // 4
        tokens = first_token + index // REGISTERS % COLUMN_TILES * (8 // DIGITS) + lane % 4 * HALF + index % HALF
        offsets = lane * COUNT + index
        SIZE: tl.constexpr = 32 * COUNT  # outputs of a tile
        y = sum_over_warps(sums[0:COUNT], COUNT, WARPS)  # [32, COUNT]
        up = y
        if GATED:
            up = sum_over_warps(sums[COUNT : 2 * COUNT], COUNT, WARPS)
    else:
        tile_row = tl.arange(0, 16 * OUT_TILES)
        tile_token = tl.arange(0, TOKENS)
        tokens = first_token + tile_token[None, :] + tl.zeros_like(tile_row)[:, None]  # [16 × OUT_TILES, TOKENS]
        rows = tile * (16 * OUT_TILES) + tile_row[:, None] + tl.zeros_like(tokens)
        offsets = tile_row[:, None] * TOKENS + tile_token[None, :]
        SIZE: tl.constexpr = 16 * OUT_TILES * TOKENS
        loaded_tokens = tl.minimum(first_token + tile_token, m - 1)
        loaded_rows = tl.minimum(tile * (16 * OUT_TILES) + tile_row, n - 1)
        begin = first * WARPS
        end = tl.minimum(last * WARPS, num_chunks)
        y = dequantized_products(x, weight, loaded_rows, loaded_tokens, begin, end, m, FORMAT)
        up = y
        if GATED:
            up = dequantized_products(x, weight, loaded_rows + n, loaded_tokens, begin, end, m, FORMAT)
    if SPLIT:
        partial_tile = tl.program_id(2) * tl.num_programs(0) + tile
        partial_ptr = scratch.partial_ptr + (partial_tile * splits + split).to(tl.int64) * (HALVES * SIZE)
        tl.store(partial_ptr + offsets, y, mask=tokens < m)
        if GATED:
            tl.store(partial_ptr + SIZE + offsets, up, mask=tokens < m)
        if not is_last_split(scratch.finished_ptr, partial_tile, splits):
            return
        tl.store(scratch.finished_ptr + partial_tile, 0)
        y = tl.zeros_like(y)
        up = y
        for other in range(splits):
            other_ptr = scratch.partial_ptr + (partial_tile * splits + other).to(tl.int64) * (HALVES * SIZE)
            y += tl.load(other_ptr + offsets, mask=tokens < m, other=0.0)
            if GATED:
                up += tl.load(other_ptr + SIZE + offsets, mask=tokens < m, other=0.0)
    row_scale_ptr = None
    if FORM != "int4":
        row_scale_ptr = weight.scale_ptr
    store_outputs(y, up, rows, tokens, m, n, row_scale_ptr, x.scale_ptr, epilogue, GATED, ACTIVATION)
