"""Linears of quantized weights: one kernel that reads tiles of a weight once and multiplies them by tiles of tokens.

    out[t, r] = act(x[t] · W[r] + bias[r]) × (x[t] · W[n + r] + bias[n + r]) + residual[t, r]           with a gate
    out[t, r] = x[t] · W[r] + bias[r] + residual[t, r]                                                  without

    x     [m, k]         unquantized, int8, float8_e4m3fn, or int8 digits (`activations`)
    W     [n, k]         [2 × n, k] with a gate: gate rows, then up rows; formats in `arguments.QuantizedWeightFormat`
    out   [m, n]         dtype of the unquantized activations

Grid: (m_tiles × ceil(n / BLOCK_N), SPLITS). A CTA computes one tile of BLOCK_N rows of the weight × TOKENS tokens over its slice of the
input features (`products`), then stores or combines it (`epilogue`). Axis 0 numbers the tiles so that the CTAs that share a tile of the
weight run at about the same time, and read it from L2:

                    token tile   0    1   ...   7   |      8        9    ...
    weight tile 0                0    1   ...   7   |  8n_tiles  8n_tiles + 1
    weight tile 1                8    9   ...  15   |     ...
         ...                              ...       |

One row of activations can be quantized by each CTA for itself (QUANTIZE), which saves a launch: every CTA stores the features that it
reads, all with the same values, before it loads them as a matrix operand.

Theoretical floor: the bytes of the weight at the speed of memory (read ceiling of an H200: 4.42 TB/s). Reached on an H200 with
Llama-3.1-8B's linears, µs and share of the ceiling (benchmarks/results/h200_quant_tiles.txt):

    | rows × weight            | fp8        | w8a8       | int8 by digits |
    | 16 × gate and up         | 35.6, 75 % | 35.3, 75 % | 35.8, 74 %     |
    | 16 × down                | 26.3, 51 % | 27.1, 49 % | 29.0, 46 %     |
    | 16 × language model head | 133, 89 %  | 131, 91 %  | 132, 90 %      |
    | 64 × gate and up         | 40.6, 65 % | 40.3, 66 % | (32 rows: 39.8, 67 %) |

`gemm.skinny` has 1 to 8 rows of int8, int4 and FP8, and `gemm.skinny_int4` 1 to 64 rows of int4 in small groups, where they are faster.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.triton.gemm.quantized.activations import QuantizedRow, quantize_row, row_quantization_step
from stoker.kernels.triton.gemm.quantized.arguments import GemmSizes, TokenTile, WeightRows
from stoker.kernels.triton.gemm.quantized.epilogue import store_or_combine
from stoker.kernels.triton.gemm.quantized.products import multiply
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait

TOKEN_TILES_PER_GROUP = tl.constexpr(8)  # token tiles that follow each other at one tile of the weight


@triton.jit
def tile_of_cta(tile_idx, m_tiles, n_tiles):
    """(token tile, weight tile) of the CTA with index `tile_idx` on axis 0, in the order that the module describes."""
    width = TOKEN_TILES_PER_GROUP * n_tiles
    first = tile_idx // width * TOKEN_TILES_PER_GROUP
    height = tl.minimum(m_tiles - first, TOKEN_TILES_PER_GROUP)
    return first + tile_idx % width % height, tile_idx % width // height


@triton.jit
def weight_rows(n_tile, n, TILE: tl.constexpr):
    """The rows of a weight that belong to its tile number `n_tile`, as `WeightRows`. The weight has n rows."""
    BLOCK_N: tl.constexpr = TILE.block_n
    row = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < n
    return WeightRows(row, inside, tl.where(inside, row, 0).to(tl.int64), n_tile * BLOCK_N)


@triton.jit
def consecutive_tokens(m_tile, m, TILE: tl.constexpr, PRODUCT: tl.constexpr):
    """The `TokenTile` number `m_tile` of m tokens that are stored in order."""
    TOKENS: tl.constexpr = TILE.tokens
    DIGITS: tl.constexpr = PRODUCT.digits
    token = m_tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < m
    column = tl.arange(0, DIGITS * TOKENS)
    column_token = m_tile * TOKENS + column // DIGITS
    column_row = column % DIGITS * m + tl.minimum(column_token, m - 1)
    return TokenTile(token, inside, tl.minimum(token, m - 1), column_row, column_token < m, m)


@triton.jit
def split_k_slice(split, k, TILE: tl.constexpr):
    """(begin, end) of the input features of a split-K slice. All slices but the last have the same length, a multiple of BLOCK_K."""
    length = tl.cdiv(tl.cdiv(k, TILE.block_k), TILE.splits) * TILE.block_k
    begin = split * length
    return begin, tl.minimum(k, begin + length)


@triton.jit(do_not_specialize=["m", "m_tiles"])
def quantized_linear_kernel(
    # Groups of pointers
    x,  # ActivationPointers
    weight,  # WeightPointers
    output,  # OutputPointers
    split_k,  # SplitKPointers
    unquantized,  # UnquantizedRow when QUANTIZE is given, else None; m is 1
    # Sizes and strides
    m,
    m_tiles,
    n,
    k,  # input features, as padded in the weight
    stride_x,
    stride_weight,
    stride_out,
    num_features,  # input features of the unquantized activations
    eps,  # of the norm
    # Groups of constants
    FORMAT: tl.constexpr,  # QuantizedWeightFormat
    TILE: tl.constexpr,  # GemmTile
    PRODUCT: tl.constexpr,  # ProductFormat
    QUANTIZE: tl.constexpr,  # QuantizeOptions: each CTA quantizes the row itself; None: x was quantized before
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of the gate
    USE_PDL: tl.constexpr,
):
    """One CTA: a split-K slice of one tile, stored or combined.

    `x`: ActivationPointers; `weight`: WeightPointers; `output`: OutputPointers; `split_k`: SplitKPointers; `unquantized`: UnquantizedRow,
    with QUANTIZE only. The constants are the named tuples of `arguments`; strides are in elements.
    """
    DIGITS: tl.constexpr = PRODUCT.digits
    GROUP: tl.constexpr = FORMAT.group
    tile_idx = tl.program_id(0)
    split = tl.program_id(1)
    m_tile, n_tile = tile_of_cta(tile_idx, m_tiles, tl.cdiv(n, TILE.block_n))
    rows = weight_rows(n_tile, n, TILE)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)

    tokens = consecutive_tokens(m_tile, m, TILE, PRODUCT)
    begin, end = split_k_slice(split, k, TILE)
    if QUANTIZE is not None:
        NORM: tl.constexpr = QUANTIZE.norm
        LIMIT: tl.constexpr = QUANTIZE.limit
        CHUNK: tl.constexpr = QUANTIZE.chunk
        x_row_ptr, norm_weight_ptr = unquantized.x_ptr, unquantized.norm_weight_ptr
        factor, step = row_quantization_step(x_row_ptr, norm_weight_ptr, unquantized.input_scale_ptr, num_features, eps, NORM, LIMIT, CHUNK)
        target = QuantizedRow(x.values_ptr, stride_x, x.group_sums_ptr, 1)
        quantize_row(x_row_ptr, norm_weight_ptr, target, factor, step, num_features, begin, end, NORM, DIGITS, GROUP, CHUNK)
        tl.store(x.scale_ptr, step)
        tl.debug_barrier()  # other threads of the CTA read what was stored

    sizes = GemmSizes(n, k, num_features, stride_x, stride_weight, stride_out)
    acc, acc_up = multiply(x, weight, tokens, rows, begin, end, sizes, FORMAT, TILE, PRODUCT, GATED)
    x_scale = None
    if x.scale_ptr is not None:  # noqa: SIM102 - a pointer that is None, then a constant
        if FORMAT.form != "block_fp8":
            x_scale = tl.load(x.scale_ptr + tokens.x_row)  # [TOKENS]
    store_or_combine(
        acc,
        acc_up,
        tile_idx,
        split,
        split_k,
        weight.row_scale_ptr,
        x_scale,
        output,
        tokens,
        rows,
        sizes,
        TILE,
        FORMAT.has_row_scale,
        GATED,
        ACTIVATION,
    )
