"""Skinny GEMM for 1 to 64 tokens against int4 in groups of up to 64 features, dequantized in registers.

    out[t, r] = Σ_k x[t, k] × w[r, k]                                   r < n
    out[t, r] = act(Σ_k x[t, k] × w[r, k]) × Σ_k x[t, k] × w[n + r, k]  (gated)            + bias, + residual

    x     [m, k] bfloat16 or float16, arranged as B fragments (`arrange`)
    w     [rows, k] int4 or FP4, two values per byte; a scale and, for some int4, a zero point per row and group

Grid: (tiles of 16 × row_tiles × num_warps weight rows, splits of the reduction dimension). Each warp has 16 × row_tiles rows of its own and
multiplies them by all tokens over the split's chunks of 64 bytes per row:

                         reduction dimension
                     | chunk 0 | chunk 1 | chunk 2 | ...         a warp's step: load the chunk num_stages ahead into registers,
    warp 0, 16 rows  |    →         →         →                  dequantize this chunk to A fragments, load the B fragments of
    warp 1, 16 rows  |    →         →         →                  all tokens (the same for all warps of a CTA: they hit L1),
                                                                 multiply

Two differences from `gemm.skinny`. There warps split the reduction dimension, so each reads its own part of the tokens, which at 32 tokens
are several times the bytes of the weights. And weights are dequantized once for all tokens, where int8 digits need the sums of every group
to be joined and scaled per token.

Layouts: weights of a lane in `gemm.skinny.fragments`, tokens in `arrange`.

Theoretical floor: the bytes of the weight ÷ 4.42 TB/s (the read bandwidth of an H200). Llama-3.1-8B in groups of 32, µs of qkv, out, up
(gated), down, head with their norms (benchmarks/results/h200_skinny_int4_tiles.json):

    | tokens | this kernel                     | of the floor, %     | through shared memory (`gemm.quantized`) |
    | 16     | 11.6,  9.7, 36.3, 21.5, 131.8   | 28, 22, 41, 35, 51  | 21.0, 14.0,  79.8, 33.0, 213.8           |
    | 32     | 15.9, 13.7, 44.6, 31.5, 181.0   | 20, 16, 34, 24, 37  | 27.8, 16.3,  90.0, 45.6, 259.2           |
    | 64     | 20.9, 20.1, 60.2, 46.1, 238.4   | 15, 11, 25, 16, 28  | 29.9, 17.5, 129.9, 47.8, 299.0           |

Half of the time does not depend on the number of tokens; the other half grows with it. 16-bit weights were tried too: tiles in shared
memory are faster from nine tokens on.
"""

# ruff: noqa: RUF005 - Triton's language concatenates tuples with +; it does not unpack them.

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.group_scales import group_tensors
from stoker.kernels.triton.gemm.skinny.epilogue import is_last_split, store_outputs
from stoker.kernels.triton.gemm.skinny.fragments import lane_rows, load_scales, load_weights, row_addresses
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from stoker.kernels.triton.ptx.mma import dequantize_int4, load_fragment, mma_m16n8
from stoker.kernels.triton.ptx.registers import repeat

CHUNK_BYTES = tl.constexpr(64)  # of a row: 16 bytes of each of four lanes
FRAGMENT_BYTES = tl.constexpr(512)  # of tokens: 16 bytes of each lane


@triton.jit
def add_chunk(
    acc,  # tuple of float32 registers, c0 … c3 of each 16-row tile and token tile
    words,  # registers of the chunk, from `load_weights`
    scales_zeros,  # from `load_scales`
    token_address,  # of the lane's first 16 bytes of the chunk's tokens
    XTYPE: tl.constexpr,
    ZERO: tl.constexpr,
    ROW_TILES: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
):
    """acc + the products of one chunk: weights `words` of the warp's rows × all tokens.

    `scales_zeros`: from `fragments.load_scales`; `token_address` (int64): the lane's first B fragment of the chunk.
    """
    STEP: tl.constexpr = group_tensors(ZERO)  # scale, or scale and zero
    for side in tl.static_range(2):  # low nibbles, high nibbles
        tokens = ()  # 8 registers per token tile
        for i in tl.static_range(2 * TOKEN_TILES):
            tokens = tokens + load_fragment(token_address, (2 * TOKEN_TILES * side + i) * FRAGMENT_BYTES)
        values = ()  # 8 registers per row of the lane
        side_scales_zeros = scales_zeros[STEP * 2 * ROW_TILES * side : STEP * 2 * ROW_TILES * (side + 1)]
        for row in tl.static_range(2 * ROW_TILES):
            scale_zero = side_scales_zeros[STEP * row : STEP * (row + 1)]
            values = values + dequantize_int4(words[4 * row : 4 * row + 4], scale_zero, side, XTYPE, ZERO)
        result = ()
        for tile in tl.static_range(ROW_TILES):
            for column in tl.static_range(TOKEN_TILES):
                sums = acc[4 * (TOKEN_TILES * tile + column) : 4 * (TOKEN_TILES * tile + column) + 4]
                for half in tl.static_range(2):
                    upper = values[16 * tile + 4 * half : 16 * tile + 4 * half + 4]  # row g
                    lower = values[16 * tile + 8 + 4 * half : 16 * tile + 8 + 4 * half + 4]  # row g + 8
                    sums = mma_m16n8(sums, upper, lower, tokens[8 * column + 4 * half : 8 * column + 4 * half + 4], XTYPE)
                result = result + sums
        acc = result
    return acc


@triton.jit
def add_partial(sums, partial_ptr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """sums + the COUNT registers of SIZE threads that the CTA of another split has stored at `partial_ptr`."""
    result = ()
    for i in tl.static_range(COUNT):
        result = result + (sums[i] + tl.load(partial_ptr + i * SIZE + tl.arange(0, SIZE)),)
    return result


@triton.jit(do_not_specialize=["m", "splits"])
def skinny_int4_gemm_kernel(
    # Pointers, and groups of pointers and strides
    x_ptr,  # [chunks × 2 × TOKEN_TILES × 2 × 32 × 8] 16 bits
    weight,  # QuantizedWeight
    epilogue,  # Epilogue
    scratch,  # SplitKScratch: of a tile [registers of a lane, threads]
    # Sizes
    m,  # tokens
    n,  # output features
    num_chunks,  # of a weight row
    splits,
    # Constants
    FORMAT: tl.constexpr,  # WeightFormat
    TILE: tl.constexpr,  # TileShape
    XTYPE: tl.constexpr,  # "bfloat16" or "float16"
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One CTA: a tile of weight rows × all tokens over one split of the reduction dimension, stored or combined with the other splits."""
    ZERO: tl.constexpr = FORMAT.zero
    GROUP: tl.constexpr = FORMAT.group
    ROW_TILES: tl.constexpr = TILE.row_tiles
    TOKEN_TILES: tl.constexpr = TILE.column_tiles
    WARPS: tl.constexpr = TILE.num_warps
    STAGES: tl.constexpr = TILE.num_stages
    SPLIT: tl.constexpr = TILE.is_split
    OUT_TILES: tl.constexpr = ROW_TILES // 2 if GATED else ROW_TILES  # 16-row tiles of outputs per warp
    ROWS: tl.constexpr = 2 * ROW_TILES  # rows of a lane
    WORDS: tl.constexpr = 4 * ROWS  # registers of a chunk
    SCALES: tl.constexpr = 2 * ROWS * group_tensors(ZERO)
    SUMS: tl.constexpr = 4 * ROW_TILES * TOKEN_TILES
    PAIRS: tl.constexpr = CHUNK_BYTES // GROUP  # pairs of groups in a chunk
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    warp_tile = tl.program_id(0) * WARPS + thread // 32  # of 16 × OUT_TILES outputs
    split_chunks = tl.cdiv(num_chunks, splits)
    first = tl.program_id(1) * split_chunks
    last = tl.minimum(first + split_chunks, num_chunks)
    rows = lane_rows(warp_tile, lane, n, ROW_TILES, GATED)
    addresses = row_addresses(weight, rows, lane, ROWS)
    pair = lane % 4 * 16 // GROUP  # of the lane's bytes in a chunk
    zero = tl.zeros_like(lane)
    words = ()
    scales_zeros = ()
    for stage in tl.static_range(STAGES):
        chunk = zero + (first + stage)
        is_valid = chunk < last
        words = words + load_weights(addresses, chunk, is_valid, ROWS, 1)
        scales_zeros = scales_zeros + load_scales(weight, rows, 2 * (chunk * PAIRS + pair), is_valid, ZERO, ROWS, 2)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)
    token_address = x_ptr.to(tl.int64) + lane * 16
    sums = repeat(zero.to(tl.float32), SUMS)
    for start in range(first, last, STAGES):
        next_words = ()
        next_scales_zeros = ()
        for stage in tl.static_range(STAGES):
            later = zero + (start + stage + STAGES)
            next_words = next_words + load_weights(addresses, later, later < last, ROWS, 1)
            next_scales_zeros = next_scales_zeros + load_scales(weight, rows, 2 * (later * PAIRS + pair), later < last, ZERO, ROWS, 2)
            chunk = zero + (start + stage)
            # Past the last chunk weights and scales are zeros, and so are their products with the last chunk's tokens.
            chunk_address = token_address + tl.minimum(chunk, last - 1).to(tl.int64) * (4 * TOKEN_TILES * FRAGMENT_BYTES)
            sums = add_chunk(
                sums,
                words[WORDS * stage : WORDS * (stage + 1)],
                scales_zeros[SCALES * stage : SCALES * (stage + 1)],
                chunk_address,
                XTYPE,
                ZERO,
                ROW_TILES,
                TOKEN_TILES,
            )
        words = next_words
        scales_zeros = next_scales_zeros
    if SPLIT:
        SIZE: tl.constexpr = 32 * WARPS
        tile = tl.program_id(0)
        tile_ptr = scratch.partial_ptr + (tile * splits).to(tl.int64) * (SUMS * SIZE)
        for i in tl.static_range(SUMS):
            tl.store(tile_ptr + tl.program_id(1) * (SUMS * SIZE) + i * SIZE + thread, sums[i])
        if not is_last_split(scratch.finished_ptr, tile, splits):
            return
        tl.store(scratch.finished_ptr + tile, 0)
        sums = repeat(zero.to(tl.float32), SUMS)
        for other in range(splits):
            sums = add_partial(sums, tile_ptr + other * (SUMS * SIZE), SUMS, SIZE)
    for tile_of_warp in tl.static_range(OUT_TILES):
        for column in tl.static_range(TOKEN_TILES):
            for i in tl.static_range(4):  # c0 … c3
                row = (warp_tile * OUT_TILES + tile_of_warp) * 16 + i // 2 * 8 + lane // 4
                token = column * 8 + lane % 4 * 2 + i % 2
                y = sums[4 * (TOKEN_TILES * tile_of_warp + column) + i]
                up = sums[4 * (TOKEN_TILES * (tile_of_warp + OUT_TILES if GATED else tile_of_warp) + column) + i]
                store_outputs(y, up, row, token, m, n, weight.row_scale_ptr, None, epilogue, GATED, ACTIVATION)
