"""Projections by experts on the GPU. The chosen experts and their rows are computed on the device (`router`) and never read by the host.

    expert_up       x [T, k], a row per token -> [T × top_k, n], a row per sorted choice, gated if it has a gate
    expert_down     [T × top_k, k], a row per sorted choice -> [T, n], the weighted sum of each token's choices and over ranks, + residual

A projection is one launch of `moe.kernel` over the tiles of all experts. A small step reads the weights of the chosen experts once, at the
speed of memory; a large one is a grouped matrix product, for which `grouped_gemm` is used where it is supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.kernels.routing import Routing
from stoker.kernels.triton.activation import gated
from stoker.kernels.triton.all_reduce import all_reduce, all_reduce_choices
from stoker.kernels.triton.all_reduce_kernel import Choices
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.quantized.arguments import OutputPointers, QuantizedWeightFormat
from stoker.kernels.triton.gemm.quantized.fp4 import CHUNK
from stoker.kernels.triton.gemm.quantized.launch import (
    gemm_tile,
    product_format,
    quantized_weight_format,
    split_k_pointers,
    weight_pointers,
)
from stoker.kernels.triton.gemm.quantized.tiles import largest_block
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.moe import grouped_gemm
from stoker.kernels.triton.moe.kernel import ExpertOptions, expert_linear_kernel
from stoker.kernels.triton.moe.operands import ExpertOperands, expert_operands
from stoker.kernels.triton.moe.routing_kernels import combine_kernel, invert_order_kernel
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import Gate

_BLOCK = 1024


class QuadTile(NamedTuple):
    """How FP4 experts in the layout `quads` are multiplied in tiles of some number of tokens."""

    tile: QuantTile
    max_registers: int | None = None  # per thread, so that an SM has more CTAs


# By the largest number of tokens of a tile. Of what was measured with 64 to 8,192 tokens of gpt-oss-20b and Qwen3-30B-A3B, with different
# numbers of rows per expert, these have the smallest times of both projections together. 16 tokens are slower than 32 with halves.
_QUAD_TILES = {
    8: QuadTile(QuantTile(128, 128, 1, 4, 4)),
    32: QuadTile(QuantTile(128, 128, 1, 4, 3), 128),
    64: QuadTile(QuantTile(128, 128, 1, 4, 3), 168),
    128: QuadTile(QuantTile(128, 64, 1, 4, 3)),
}
# (rows per expert up to which tiles have a number of tokens, this number)
_QUAD_TOKENS = ((7, 8), (16, 32), (192, 64))
# Tokens of the halves and quarters of these tiles. Those of 128 tokens have none: rows are many, and times equal.
_PARTS = {32: (16, None), 64: (32, 16)}


def expert_up(
    x: Tensor,
    weight: PackedWeight,
    routing: Routing,
    gate: Gate | None = None,
    tile: QuantTile | None = None,
    tokens: int | None = None,
) -> Tensor:
    """The first projection of each token by each of its experts (`ops.expert_up`).

    The projection of FP4 in the layout `quads`, whose tiles have rows of both halves, applies the gate; after others it is a launch.
    `tile` and `tokens`, the number of tokens of a tile, override the choices by rule.
    """
    if weight.layout == "quads":
        return _project(x, weight, routing, tile, tokens, gate=gate, is_sorted=False)
    if tile is None and grouped_gemm.is_supported(x, weight, routing):
        y = grouped_gemm.expert_linear(x, weight, routing, is_sorted=False)
    else:
        y = _project(x, weight, routing, tile, tokens, is_sorted=False)
    return y if gate is None else gated(y, gate)


def expert_down(
    x: Tensor,
    weight: PackedWeight,
    routing: Routing,
    residual: Tensor | None = None,
    input_gate: str | None = None,
    group: Group = SINGLE,
    tile: QuantTile | None = None,
    tokens: int | None = None,
) -> Tensor:
    """The last projection by each expert, summed per token and over ranks (`ops.expert_down`).

    Without `tile`, it chooses one, or the grouped GEMM where that is supported. `tokens`: as in `expert_up`.
    """
    rows = None
    if tile is None and grouped_gemm.is_supported(x, weight, routing):
        y, rows = grouped_gemm.expert_linear(x, weight, routing, input_gate, is_sorted=True), inverse_order(routing)
    else:
        y = _project(x, weight, routing, tile, tokens, input_gate, is_sorted=True)
    choices = Choices(routing.weights, rows)
    if group.size == 1:
        return _combine(y, choices, residual)
    total = all_reduce_choices(y, choices, group, residual)
    return all_reduce(_combine(y, choices, None), group, residual) if total is None else total


def inverse_order(routing: Routing) -> Tensor:
    """int32 [T × k]: for each choice, its index in routing.order."""
    places = torch.empty_like(routing.order)
    if len(places):
        options = pdl_launch_options(places)
        invert_order_kernel[(cdiv(len(places), _BLOCK),)](routing.order, places, len(places), BLOCK=_BLOCK, num_warps=4, **options)
    return places


def _project(
    x: Tensor,
    weight: PackedWeight,
    routing: Routing,
    tile: QuantTile | None,
    tokens: int | None,
    input_gate: str | None = None,
    gate: Gate | None = None,
    *,
    is_sorted: bool,
) -> Tensor:
    """[T × k, n]: each row times the weight of its expert. With `input_gate`, a row has gates and ups; with `gate`, the weight has.

    With `is_sorted`, x has a row per sorted choice and results are in the order of the choices. Without it, x has a row per token and
    results are in the order of routing.order.
    """
    dtype = x.dtype
    is_quads = weight.layout == "quads"
    tokens = tokens or tile_tokens(routing.order.shape[0], routing.offsets.shape[0] - 1, is_quads)
    operands = expert_operands(x, weight, routing, tokens, is_sorted, input_gate)
    values, weight = operands.x.values_ptr, operands.weight
    if not weight.values.is_contiguous() or values.stride(-1) != 1:
        raise ValueError(
            f"experts: weights of strides {weight.values.stride()} and activations of strides {values.stride()}: weights must be "
            "contiguous, and the last stride of activations must be 1"
        )
    m, experts = routing.order.shape[0], weight.num_experts
    n, k = weight.out_features // (1 if gate is None else 2), weight.in_features
    out = torch.empty((m, n), dtype=dtype, device=values.device)
    if m == 0:
        return out
    weight_format = quantized_weight_format(values, weight)
    max_registers = None
    if tile is None and is_quads and values.element_size() == 2:
        tile, max_registers = _quad_tile(m, tokens, weight, values.device)
    elif tile is None:
        tile = _tile(m, tokens, operands, weight_format)
    half, quarter = _PARTS.get(tokens, (None, None)) if is_quads and tile.splits == 1 else (None, None)
    # With more tiles than experts, the weight of a second tile would be read from memory again.
    first_tiles = half is not None and routing.is_whole and routing.experts is None and experts <= m <= experts * tokens
    m_tiles = experts + (m - 1) // tokens if first_tiles else max_token_tiles(m, experts + 2, tokens)
    if gate is not None:  # half of the rows are gates
        tile = replace(tile, block_n=tile.block_n // 2)
    num_tiles = m_tiles * cdiv(n, tile.block_n)
    tile_shape = gemm_tile(weight_format, tile, tokens, num_tiles)
    expert_linear_kernel[(num_tiles, tile_shape.splits)](
        operands.x,
        weight_pointers(weight, weight_format),
        OutputPointers(weight.bias, None, out),
        split_k_pointers(num_tiles, tile_shape, gate is not None, values.device),
        routing.order,
        routing.offsets,
        routing.experts,
        m,
        m_tiles,
        n,
        k,
        values.stride(0),
        weight.values.stride(1),
        n,
        values.shape[1],
        FORMAT=weight_format,
        TILE=tile_shape,
        PRODUCT=product_format(values, weight_format, k, tile_shape, operands.digits),
        EXPERTS=ExpertOptions(experts, next_power_of_2(experts + 2), 0 if operands.is_sorted else routing.top_k, is_sorted, first_tiles),
        HALF_TILE=half and tile_shape._replace(tokens=half),
        QUARTER_TILE=quarter and tile_shape._replace(tokens=quarter),
        GATE=gate,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=max_registers,
        **pdl_launch_options(values),
    )
    return out


def max_token_tiles(rows: int, segments: int, tokens: int) -> int:
    """The largest number of tiles of `tokens` tokens that `rows` rows in `segments` segments can have; see `moe.kernel`.

    Each segment with rows has one tile for its first row, and another one for each `tokens` further ones.
    """
    used = min(segments, rows)
    return used + (rows - used) // tokens


def tile_tokens(rows: int, experts: int, is_quads: bool = False) -> int:
    """The number of tokens of a tile, by the rows of an expert when choices are spread evenly.

    In the layout `quads` it is that of _QUAD_TOKENS, otherwise twice the rows. With smaller tiles, more experts read their weights twice,
    and with larger ones, more rows of a product are empty.
    """
    if is_quads:
        return next((tokens for rows_per_expert, tokens in _QUAD_TOKENS if rows <= rows_per_expert * experts), 128)
    return min(128, max(8, next_power_of_2(2 * cdiv(rows, experts))))


def _quad_tile(rows: int, tokens: int, weight: PackedWeight, device: torch.device) -> QuadTile:
    """The tile of `weight` in the layout `quads` for `rows` rows in tiles of `tokens` tokens, with its split-K slices."""
    found = next(_QUAD_TILES[size] for size in _QUAD_TILES if tokens <= size)
    return found._replace(tile=_split(found.tile, rows, weight, num_sms(device)))


def _tile(rows: int, tokens: int, operands: ExpertOperands, weight_format: QuantizedWeightFormat) -> QuantTile:
    """The tile for `rows` rows in tiles of `tokens` tokens, by a rule."""
    values, weight = operands.x.values_ptr, operands.weight
    item, form, group = values.element_size(), weight_format.form, weight_format.group
    if item == 4:
        return QuantTile(32, _block_k(weight, form, 32), 1, 8 if form in ("int4", "fp4") else 4, 2)
    if tokens > 64 and form in ("block_fp8", "grouped_int8"):
        # The sums and the product that is added to them both take registers: tiles of 128 weight rows spill.
        return QuantTile(64, _block_k(weight, form, 64), 1, 8 if form == "grouped_int8" else 4, 4 if group <= 128 else 2)
    if tokens > 64:
        return QuantTile(128, _block_k(weight, form, 128 // item), 1, 8, 2 if form == "int4" and group > 64 else 4)
    tile = QuantTile(64, _block_k(weight, form, max(64, 256 // item)), 1, 8 if operands.digits == 2 and tokens > 16 else 4, 4)
    return _split(tile, rows, weight, num_sms(values.device))


def _split(tile: QuantTile, rows: int, weight: PackedWeight, num_sms: int) -> QuantTile:
    """`tile` with its number of split-K slices for `rows` choices: a power of two, so that each SM has two CTAs if that is possible.

    Every slice keeps at least four iterations of `tile.block_k` input features. `weight` are the experts [E, N, K].
    """
    splits, num_tiles = 1, min(rows, weight.num_experts) * cdiv(weight.out_features, tile.block_n)
    while num_tiles * splits < 2 * num_sms and weight.in_features // (tile.block_k * splits * 2) >= 4:
        splits *= 2
    return replace(tile, splits=splits)


def _block_k(weight: PackedWeight, form: str, limit: int) -> int:
    """The number of input features of a tile: at most `limit`, if the groups of the weight allow it.

    For int4 it is a whole number of pairs of groups that divides k.
    """
    k, group = weight.in_features, weight.group_size
    if form == "int4":
        return largest_block(k, 2 * group, limit)
    if form == "fp4":
        return CHUNK
    if form == "grouped_int8":
        return largest_block(cdiv(k, group) * group, group, limit)
    return group if form == "block_fp8" else limit


def _combine(y: Tensor, choices: Choices, residual: Tensor | None) -> Tensor:
    """[T, size]: the sum of each token's choices, weighted by `choices.weights_ptr`, + `residual` [T, size]."""
    (tokens, top_k), size = choices.weights_ptr.shape, y.shape[1]
    out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
    if tokens:
        grid = (tokens, cdiv(size, _BLOCK))
        residual = None if residual is None else residual.contiguous()
        options = pdl_launch_options(y)
        combine_kernel[grid](
            y, choices.rows_ptr, choices.weights_ptr, residual, out, size, TOP_K=top_k, BLOCK=_BLOCK, num_warps=4, **options
        )
    return out
