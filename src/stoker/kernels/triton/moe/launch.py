"""Projections by experts on the GPU. The chosen experts and their rows are computed on the device (`router`) and never read by the host.

    expert_up       x [T, k], a row per token -> [T × top_k, n], a row per sorted choice
    expert_down     [T × top_k, k], a row per sorted choice -> [T, n], the weighted sum of each token's choices and over ranks, + residual

A projection is one launch of `moe.kernel` over the tiles of all experts. A small step reads the weights of the chosen experts once, at the
speed of memory; a large one is a grouped matrix product, for which `grouped_gemm` is used where it is supported.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.kernels.routing import Routing
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
from stoker.kernels.triton.moe.routing_kernels import (
    clipped_gate_kernel,
    combine_kernel,
    invert_order_kernel,
)
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import QuantTile

_BLOCK = 1024
# Tiles of FP4 experts in the layout `quads` by the largest number of tokens: weight rows, input features, warps and stages. Of up to 84
# that were measured with 1 to 2,048 rows of gpt-oss-20b and Qwen3-30B-A3B, these have the smallest times together. The best tile of a
# single case is up to 13 % faster (8 rows, Qwen3's down projection: 18.7 instead of 21.5 µs).
_QUAD_TILES = {
    8: QuantTile(128, 128, 1, 4, 4),
    16: QuantTile(128, 128, 1, 4, 4),
    32: QuantTile(128, 128, 1, 4, 3),
    64: QuantTile(128, 64, 1, 4, 3),
    128: QuantTile(128, 64, 1, 4, 3),
}


def expert_up(x: Tensor, weight: PackedWeight, routing: Routing, tile: QuantTile | None = None, tokens: int | None = None) -> Tensor:
    """The first projection of each token by each of its experts (`ops.expert_up`).

    `tile` and `tokens`, the number of tokens of a tile, override the choices by rule.
    """
    if tile is None and grouped_gemm.is_supported(x, weight, routing):
        return grouped_gemm.expert_linear(x, weight, routing, is_sorted=False)
    return _project(x, weight, routing, tile, tokens, is_sorted=False)


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


def clipped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """The gate of gpt-oss (`ops.clipped_gate`)."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (out.numel() // size, cdiv(size, _BLOCK))
        clipped_gate_kernel[grid](gate_up, out, size, limit, alpha, BLOCK=_BLOCK, num_warps=4, **pdl_launch_options(gate_up))
    return out


def _project(
    x: Tensor,
    weight: PackedWeight,
    routing: Routing,
    tile: QuantTile | None,
    tokens: int | None,
    input_gate: str | None = None,
    *,
    is_sorted: bool,
) -> Tensor:
    """[T × k, n]: each row times the weight of its expert. With `input_gate`, a row has gates and ups.

    With `is_sorted`, x has a row per sorted choice and results are in the order of the choices. Without it, x has a row per token and
    results are in the order of routing.order.
    """
    dtype = x.dtype
    tokens = tokens or tile_tokens(routing.order.shape[0], routing.offsets.shape[0] - 1, weight.is_fp4)
    operands = expert_operands(x, weight, routing, tokens, is_sorted, input_gate)
    values, weight = operands.x.values_ptr, operands.weight
    if not weight.values.is_contiguous() or values.stride(-1) != 1:
        raise ValueError(
            f"experts: weights of strides {weight.values.stride()} and activations of strides {values.stride()}: weights must be "
            "contiguous, and the last stride of activations must be 1"
        )
    m, experts = routing.order.shape[0], weight.num_experts
    n, k = weight.out_features, weight.in_features
    out = torch.empty((m, n), dtype=dtype, device=values.device)
    if m == 0:
        return out
    weight_format = quantized_weight_format(values, weight)
    m_tiles = max_token_tiles(m, experts + 2, tokens)
    tile = tile or _tile(m, tokens, operands, weight_format)
    num_tiles = m_tiles * cdiv(n, tile.block_n)
    tile_shape = gemm_tile(weight_format, tile, tokens, num_tiles)
    expert_linear_kernel[(num_tiles, tile_shape.splits)](
        operands.x,
        weight_pointers(weight, weight_format),
        OutputPointers(weight.bias, None, out),
        split_k_pointers(num_tiles, tile_shape, False, values.device),
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
        EXPERTS=ExpertOptions(experts, next_power_of_2(experts + 2), 0 if operands.is_sorted else routing.top_k, is_sorted),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch_options(values),
    )
    return out


def max_token_tiles(rows: int, segments: int, tokens: int) -> int:
    """The largest number of tiles of `tokens` tokens that `rows` rows in `segments` segments can have; see `moe.kernel`.

    Each segment with rows has one tile for its first row, and another one for each `tokens` further ones.
    """
    used = min(segments, rows)
    return used + (rows - used) // tokens


def tile_tokens(rows: int, experts: int, is_fp4: bool = False) -> int:
    """The number of tokens of a tile: twice the rows of an expert when choices are spread evenly; of FP4 one eighth more than these rows.

    With smaller tiles, more experts read their weights twice, and with larger ones, more rows of a product are empty. Measured for FP4 with
    random routing, up projection of gpt-oss-20b: 56 rows of an expert take 199, 162 and 239 µs in tiles of 32, 64 and 128 tokens, 16 rows
    119, 97 and 133 in tiles of 16, 32 and 64. Other formats were not measured.
    """
    return min(128, max(8, next_power_of_2(cdiv(9 * rows, 8 * experts) if is_fp4 else 2 * cdiv(rows, experts))))


def _tile(rows: int, tokens: int, operands: ExpertOperands, weight_format: QuantizedWeightFormat) -> QuantTile:
    """The tile for `rows` rows in tiles of `tokens` tokens, by a rule."""
    values, weight = operands.x.values_ptr, operands.weight
    item, form, group = values.element_size(), weight_format.form, weight_format.group
    if form == "fp4" and item == 2:
        return _split(_QUAD_TILES[min(tokens, max(_QUAD_TILES))], rows, weight, num_sms(values.device))
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
