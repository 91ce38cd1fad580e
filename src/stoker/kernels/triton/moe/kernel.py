"""Projections of a mixture of experts: the tiles of all experts in one launch, over rows that are sorted by expert.

    out[c] = x[row(c)] · W[expert(c)]ᵀ + bias[expert(c)]                  for each of the m sorted choices c
    out[c] = gate of the halves of the same                               with a gate: n rows of gates, then n of ups

    order     int32 [m]              choices sorted by expert: choice number order[c] is at place c
    offsets   int32 [experts + 1]    choices offsets[e] : offsets[e + 1] belong to expert e of this rank
    row(c)    order[c] // top_k (up projection: x has a row per token), or c (down projection: x has a row per sorted choice)
    out       [m, n]: row c, or with SCATTER row order[c], so that the rows of a token are neighbours again

Grid: (m_tiles × ceil(n / BLOCK_N), SPLITS). How many token tiles there are is known on the device only. The grid has as many as there can
be, and each CTA finds its tile in a list that it computes from the offsets (`find_expert_tile`); CTAs without a tile exit.

    segments of the sorted choices    | earlier ranks |     expert 0     | expert 1 | expert 2: none |  ...  | later ranks |
    segment starts at                 0               offsets[0]         offsets[1] offsets[2]               offsets[E]
    token tiles                       |   0   |   1   |   2   |  3  |  4 |    5     |                |  ...  |   t   | t + 1 |

Every segment starts with a new tile, and its last tile may not be full. Tiles of other ranks' choices store zeros. With `first_tiles`,
token tile e has the first rows of expert e, which takes two loads instead of a search, and the other tiles follow in the order above.

Tiles of FP4 that are at most half or a quarter full are multiplied as tiles of half or a quarter of the tokens.

The product and the epilogue are those of the linears: `gemm.quantized.products`, `gemm.quantized.epilogue`.

Theoretical floor: of few rows the bytes of the chosen experts' weights at the speed of memory, of many rows the arithmetic. Reached on an
H200 (docs/performance.md): Mixtral-8x7B decodes at 82 % of its roofline with one row, at 90 % with 64 rows over all experts. Its up
projection with 128 rows per expert takes 501 µs in FP8 and 744 in bfloat16; `grouped_gemm` is faster for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.triton.gemm.quantized.arguments import GemmSizes, OutputPointers, TokenTile, WeightPointers
from stoker.kernels.triton.gemm.quantized.epilogue import store_or_combine
from stoker.kernels.triton.gemm.quantized.fp4_products import paired_rows
from stoker.kernels.triton.gemm.quantized.kernel import split_k_slice, tile_of_cta, weight_rows
from stoker.kernels.triton.gemm.quantized.products import multiply
from stoker.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


class ExpertOptions(NamedTuple):
    """Constants: the experts of this rank, and how choices (token, expert) are assigned to rows."""

    count: int  # experts of this rank
    segments: int  # count + 2 segments, rounded up to a power of two
    top_k: int  # x has a row per token, which has this many choices; 0: a row per sorted choice
    scatter: bool  # results are stored in the order of the choices, not of the experts
    first_tiles: bool  # token tile e has the first rows of expert e


class SortedChoices(NamedTuple):
    """Runtime: the sorted choices."""

    order_ptr: Tensor  # int32 [m]
    experts_ptr: Tensor | None  # int32 [m]: the experts of the choices of one token; None: of several, or of experts on several ranks
    count: Any  # m


class ExpertTile(NamedTuple):
    """Runtime: one tile, and its split-K slice."""

    index: Any  # of the CTA on axis 0
    split: Any
    expert: Any
    first: Any  # place of the first choice in `order`
    end: Any  # of the expert's choices


@triton.jit
def _add_each(a, b, c, x, y, z):
    """(a + x, b + y, c + z): three sums in one reduction, whose threads wait for each other once."""
    return a + x, b + y, c + z


@triton.jit
def find_expert_tile(tile, offsets_ptr, num_rows, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """(expert, first row, end row) of token tile number `tile`. Expert -1: rows of other ranks. end <= first: there is no such tile."""
    COUNT: tl.constexpr = EXPERTS.count
    if EXPERTS.first_tiles:
        expert, first_row, end_row = tile, 0, 0
        if tile < COUNT:
            first_row = tl.load(offsets_ptr + tile)
            end_row = tl.load(offsets_ptr + tile + 1)
        else:
            expert, first_row, end_row = search_expert_tile(tile - COUNT, offsets_ptr, num_rows, EXPERTS, TOKENS)
    else:
        expert, first_row, end_row = search_expert_tile(tile, offsets_ptr, num_rows, EXPERTS, TOKENS)
    return expert, first_row, end_row


@triton.jit
def search_expert_tile(tile, offsets_ptr, num_rows, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """`find_expert_tile` by the numbers of tiles of the segments; with `first_tiles` without the first ones of experts.

    Segment 0 has the rows before offsets[0], segment e + 1 those of expert e, the last one those from offsets[count] on.
    """
    COUNT: tl.constexpr = EXPERTS.count
    SEGMENTS: tl.constexpr = EXPERTS.segments
    segment = tl.arange(0, SEGMENTS)
    begin = tl.load(offsets_ptr + segment - 1, mask=(segment > 0) & (segment < COUNT + 2), other=0)
    end = tl.load(offsets_ptr + segment, mask=segment < COUNT + 1, other=num_rows)
    end = tl.where(segment < COUNT + 2, end, begin)
    tiles = tl.where(segment < COUNT + 2, (end - begin + TOKENS - 1) // TOKENS, 0)  # tiles of each segment
    is_expert = (segment > 0) & (segment <= COUNT)
    skipped = 0
    if EXPERTS.first_tiles:
        skipped = is_expert.to(tl.int32)
        tiles = tl.maximum(tiles - skipped, 0)
    tiles_end = tl.cumsum(tiles, 0)
    tiles_begin = tiles_end - tiles
    is_segment = (tiles_begin <= tile) & (tile < tiles_end)
    number = tl.where(is_segment & is_expert, segment, 0)  # 1 + the expert
    first_row = tl.where(is_segment, begin + (tile - tiles_begin + skipped) * TOKENS, 0)
    number, first_row, end_row = tl.reduce((number, first_row, tl.where(is_segment, end, 0)), 0, _add_each)
    return number - 1, first_row, end_row


@triton.jit
def expert_scale_offset(expert, n, k, FORMAT: tl.constexpr):
    """The number of elements from the scales (and zeros) of expert 0 to those of `expert`. n and k: sizes of one expert's weight."""
    FORM: tl.constexpr = FORMAT.form
    if FORM == "int4":
        return expert.to(tl.int64) * (k // FORMAT.group) * n
    elif FORM == "fp4":
        return expert.to(tl.int64) * (k // (2 * FORMAT.group)) * (n // 2)
    elif FORM == "grouped_int8":
        return expert.to(tl.int64) * n * tl.cdiv(k, FORMAT.group)
    elif FORM == "block_fp8":
        return expert.to(tl.int64) * tl.cdiv(n, FORMAT.block_rows) * tl.cdiv(k, FORMAT.group)
    else:
        return expert * n


@triton.jit
def project_tile(
    tile,  # ExpertTile
    choices,  # SortedChoices
    x,  # ActivationPointers
    weight,  # WeightPointers
    output,  # OutputPointers, without a residual
    split_k,  # SplitKPointers
    rows,  # WeightRows
    sizes,  # GemmSizes
    FORMAT: tl.constexpr,  # QuantizedWeightFormat
    TILE: tl.constexpr,  # GemmTile
    PRODUCT: tl.constexpr,  # ProductFormat
    EXPERTS: tl.constexpr,  # ExpertOptions
    GATE: tl.constexpr,  # `types.Gate`, or None
):
    """Multiply, and store or combine, a tile of TILE.tokens tokens of an expert."""
    TOKENS: tl.constexpr = TILE.tokens
    DIGITS: tl.constexpr = PRODUCT.digits
    GATED: tl.constexpr = GATE is not None
    expert = tile.expert
    choice = tile.first + tl.arange(0, TOKENS)  # [TOKENS]: places in `order`
    last = tile.end - 1
    out_row = choice
    if EXPERTS.scatter:
        out_row = tl.load(choices.order_ptr + tl.minimum(choice, last))
    num_rows = choices.count
    x_row = tl.minimum(choice, last)
    column = tl.arange(0, DIGITS * TOKENS)
    column_choice = tile.first + column // DIGITS
    column_row = tl.minimum(column_choice, last)
    if EXPERTS.top_k > 0 and choices.experts_ptr is not None:
        num_rows = 1
        x_row = tl.zeros_like(x_row)
        column_row = tl.zeros_like(column_row)
    elif EXPERTS.top_k > 0:
        num_rows = num_rows // EXPERTS.top_k
        x_row = tl.load(choices.order_ptr + x_row) // EXPERTS.top_k
        column_row = tl.load(choices.order_ptr + column_row) // EXPERTS.top_k
    column_row += column % DIGITS * num_rows
    tokens = TokenTile(out_row, choice <= last, x_row, column_row, column_choice <= last, num_rows)
    n, k = sizes.n * 2 if GATED else sizes.n, sizes.k  # of an expert's weight
    values_ptr = weight.values_ptr + expert.to(tl.int64) * n * sizes.stride_weight
    scale_ptr, zero_ptr = weight.scale_ptr, weight.zero_ptr
    if scale_ptr is not None:
        scale_ptr += expert_scale_offset(expert, n, k, FORMAT)
    if zero_ptr is not None:
        zero_ptr += expert_scale_offset(expert, n, k, FORMAT)
    row_scale_ptr = weight.row_scale_ptr
    if row_scale_ptr is not None:
        row_scale_ptr += expert * n
    expert_weight = WeightPointers(values_ptr, scale_ptr, zero_ptr, row_scale_ptr)
    bias_ptr = output.bias_ptr
    if bias_ptr is not None:
        bias_ptr += expert * n

    begin, end = split_k_slice(tile.split, k, TILE)
    acc, acc_up = multiply(x, expert_weight, tokens, rows, begin, end, sizes, FORMAT, TILE, PRODUCT, GATED)
    x_scale = None
    if x.scale_ptr is not None:  # noqa: SIM102 - a pointer that is None, then a constant
        if FORMAT.form != "block_fp8":
            x_scale = tl.load(x.scale_ptr + tokens.x_row)  # [TOKENS]
    store_or_combine(
        acc,
        acc_up,
        tile.index,
        tile.split,
        split_k,
        row_scale_ptr,
        x_scale,
        OutputPointers(bias_ptr, None, output.out_ptr),
        tokens,
        rows,
        sizes,
        TILE,
        FORMAT.has_row_scale,
        GATED,
        GATE,
    )


@triton.jit(do_not_specialize=["m", "m_tiles"])
def expert_linear_kernel(
    # Groups of pointers
    x,  # ActivationPointers
    weight,  # WeightPointers
    output,  # OutputPointers, without a residual
    split_k,  # SplitKPointers
    # Pointers
    order_ptr,  # int32 [m]
    offsets_ptr,  # int32 [experts + 1]
    experts_ptr,  # int32 [m]: the experts of the choices of one token; None: of several tokens, or of experts on several ranks
    # Sizes and strides
    m,  # choices
    m_tiles,
    n,  # features of the result: half of the rows of a gated weight
    k,  # input features, as padded in the weight
    stride_x,
    stride_weight,
    stride_out,
    num_features,  # input features of the activations
    # Groups of constants
    FORMAT: tl.constexpr,  # QuantizedWeightFormat
    TILE: tl.constexpr,  # GemmTile
    PRODUCT: tl.constexpr,  # ProductFormat
    EXPERTS: tl.constexpr,  # ExpertOptions
    HALF_TILE: tl.constexpr,  # GemmTile with half of the tokens, for experts that have no more rows; None: all have the same tile
    QUARTER_TILE: tl.constexpr,  # likewise with a quarter
    GATE: tl.constexpr,  # `types.Gate`, or None
    USE_PDL: tl.constexpr,
):
    """One CTA: a split-K slice of one tile of one expert, stored or combined.

    `x`: ActivationPointers; `weight`: WeightPointers; `output`: OutputPointers; `split_k`: SplitKPointers. Constants: named tuples of
    `gemm.quantized.arguments`.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    TOKENS: tl.constexpr = TILE.tokens
    tile_idx = tl.program_id(0)
    m_tile, n_tile = tile_of_cta(tile_idx, m_tiles, tl.cdiv(n, BLOCK_N))
    if FORMAT.form == "fp4" and GATE is None:
        rows = paired_rows(n_tile, n, TILE)
    else:
        rows = weight_rows(n_tile, n, TILE)
    pdl_wait(USE_PDL)
    pdl_launch_dependents(USE_PDL)

    if experts_ptr is None:
        expert, first, end_row = find_expert_tile(m_tile, offsets_ptr, m, EXPERTS, TOKENS)
        if first >= end_row:
            return
    else:  # every choice is a tile
        expert = tl.load(experts_ptr + m_tile)
        first = m_tile
        end_row = m_tile + 1
    if expert < 0:
        choice = first + tl.arange(0, TOKENS)
        out_row = choice
        if EXPERTS.scatter:
            out_row = tl.load(order_ptr + tl.minimum(choice, end_row - 1))
        zeros = tl.zeros([BLOCK_N, TOKENS], tl.float32).to(output.out_ptr.dtype.element_ty)
        offset = out_row.to(tl.int64)[None, :] * stride_out + rows.row[:, None]
        tl.store(output.out_ptr + offset, zeros, mask=rows.inside[:, None] & (choice < end_row)[None, :])
        return
    tile = ExpertTile(tile_idx, tl.program_id(1), expert, first, end_row)
    choices = SortedChoices(order_ptr, experts_ptr, m)
    sizes = GemmSizes(n, k, num_features, stride_x, stride_weight, stride_out)
    if HALF_TILE is None:  # noqa: SIM114 - a constant, then a value
        project_tile(tile, choices, x, weight, output, split_k, rows, sizes, FORMAT, TILE, PRODUCT, EXPERTS, GATE)
    elif end_row - first > TOKENS // 2:
        project_tile(tile, choices, x, weight, output, split_k, rows, sizes, FORMAT, TILE, PRODUCT, EXPERTS, GATE)
    elif QUARTER_TILE is None:  # noqa: SIM114 - likewise
        project_tile(tile, choices, x, weight, output, split_k, rows, sizes, FORMAT, HALF_TILE, PRODUCT, EXPERTS, GATE)
    elif end_row - first > TOKENS // 4:
        project_tile(tile, choices, x, weight, output, split_k, rows, sizes, FORMAT, HALF_TILE, PRODUCT, EXPERTS, GATE)
    else:
        project_tile(tile, choices, x, weight, output, split_k, rows, sizes, FORMAT, QUARTER_TILE, PRODUCT, EXPERTS, GATE)
