"""Mixture of experts on the GPU: which experts run, and over which rows, is decided and kept on the device.

The two projections are launches of the streaming kernel over tiles of the rows sorted by expert. How many tiles there are is known on
the device only; the grid has as many as there may be, and each program finds its tile's expert from the offsets. So a small step reads the
weights of the chosen experts once, at the speed of memory, and a large one is a grouped matrix product.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.quantized.kernel import quant_linear_kernel
from stoker.kernels.triton.gemm.quantized.launch import MAX_TILES, arrived, flags, kernel_form
from stoker.kernels.triton.gemm.quantized.tiles import largest_block
from stoker.kernels.triton.moe import library_gemm as moe_library
from stoker.kernels.triton.moe.operands import Operands, operands_of
from stoker.kernels.triton.moe.routing_kernels import choose_kernel, clipped_gate_kernel, combine_kernel, sort_kernel
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import QuantTile

_BLOCK = 1024
MOST_EXPERTS = 1024


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """See `ops.route`. Of experts with equal scores the first is chosen; a token with a NaN has NaN weights."""
    tokens, experts = logits.shape
    if experts > MOST_EXPERTS or experts % params.num_groups:
        raise ValueError(
            f"routing over {experts} experts in {params.num_groups} groups; takes equal groups of at most {MOST_EXPERTS} in all"
        )
    logits = logits.contiguous()
    weights = torch.empty((tokens, params.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, params.top_k), dtype=torch.int32, device=logits.device)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=logits.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=logits.device)
    groups = triton.next_power_of_2(params.num_groups)
    if tokens:
        choose_kernel[(tokens,)](
            logits, correction, weights, ids, params.score, params.renormalize, params.scale, NUM_EXPERTS=experts,
            NUM_GROUPS=params.num_groups, TOP_GROUPS=params.top_groups, TOP2=params.group_score == "top2", TOP_K=params.top_k,
            BLOCK_GROUPS=groups, BLOCK_SIZE=triton.next_power_of_2(experts // params.num_groups),
            BLOCK_K=triton.next_power_of_2(params.top_k), num_warps=1, **pdl_launch_options(logits),
        )  # fmt: skip
    block = min(_BLOCK, triton.next_power_of_2(max(1, ids.numel())))
    sort_kernel[(experts + 1,)](ids, order, offsets, ids.numel(), BLOCK=block, num_warps=max(1, block // 256), **pdl_launch_options(logits))
    return Routing(weights, order, offsets)


def expert_up(x: Tensor, weight: PackedWeight, routing: Routing, tile: QuantTile | None = None) -> Tensor:
    """See `ops.expert_up`."""
    if tile is None and moe_library.takes(x, weight, routing):
        return moe_library.product(x, weight, routing, is_sorted=False)
    return _project(_operands(x, weight, routing, is_sorted=False), routing, False, x.dtype, tile)


def expert_down(x: Tensor, weight: PackedWeight, routing: Routing, tile: QuantTile | None = None) -> Tensor:
    """See `ops.expert_down`."""
    if tile is None and moe_library.takes(x, weight, routing):
        return _combine(moe_library.product(x, weight, routing, is_sorted=True), routing, moe_library.places(routing))
    return _combine(_project(_operands(x, weight, routing, is_sorted=True), routing, True, x.dtype, tile), routing)


def _operands(x: Tensor, weight: PackedWeight, routing: Routing, *, is_sorted: bool) -> Operands:
    return operands_of(x, weight, routing, tile_rows(routing.order.shape[0], routing.offsets.shape[0] - 1), is_sorted)


def clipped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """See `ops.clipped_gate`."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (out.numel() // size, triton.cdiv(size, _BLOCK))
        clipped_gate_kernel[grid](gate_up, out, size, limit, alpha, BLOCK=_BLOCK, num_warps=4, **pdl_launch_options(gate_up))
    return out


def _project(given: Operands, routing: Routing, down: bool, dtype: torch.dtype, tile: QuantTile | None) -> Tensor:
    """Sorted rows through their experts: [T × k, n] in the order of routing.order, or by choice when `down`."""
    x, weight = given.rows, given.weight
    if not weight.values.is_contiguous() or x.stride(-1) != 1:
        raise ValueError(f"experts take dense weights and rows; strides are {weight.values.stride()} and {x.stride()}")
    rows, experts = routing.order.shape[0], weight.num_experts
    n, k = weight.out_features, weight.in_features
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    tokens = tile_rows(rows, experts)
    m_tiles = min(experts + 2, rows) + rows // tokens
    tile = tile or _tile(rows, tokens, given, experts)
    programs = m_tiles * triton.cdiv(n, tile.block_n)
    splits = tile.splits if programs <= MAX_TILES else 1
    partial = counters = None
    if splits > 1:
        partial = torch.empty((programs, splits, tile.block_n, tokens), dtype=torch.float32, device=x.device)
        counters = arrived(x.device)
    quant_linear_kernel[(programs, splits)](
        x, given.scale, given.sums, weight.values, weight.scale, weight.zero, weight.bias, None, out, partial, counters, None, None, None,
        routing.order, routing.offsets, rows, m_tiles, n, k, x.stride(0), weight.values.stride(1), n, x.shape[1], 0.0,
        GATED=False, ACT="silu", SPLITS=splits, DIGITS=given.digits, EXPERTS=experts, EXPERT_BLOCK=triton.next_power_of_2(experts + 2),
        TOP_K=0 if given.is_sorted else routing.top_k, SCATTER=down, TOKENS=tokens, ENCODE=False, NORM=False, LIMIT=0.0, CHUNK=128,
        **flags(x, weight, tile), **pdl_launch_options(x),
    )  # fmt: skip
    return out


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: twice an expert's share when choices spread evenly, lest weights be read again for a few rows more."""
    return min(128, max(8, triton.next_power_of_2(2 * triton.cdiv(rows, experts))))


def _tile(rows: int, tokens: int, given: Operands, experts: int) -> QuantTile:
    weight, item = given.weight, given.rows.element_size()
    form, group = kernel_form(given.rows, weight), weight.group_size
    if item == 4:
        return QuantTile(32, _depth(weight, form, 32), 1, 8 if form == "int4" else 4, 2)
    if tokens > 64 and form in ("block", "groups"):  # sums and the product that is added to them: 128 rows of weights spill
        return QuantTile(64, _depth(weight, form, 64), 1, 8 if form == "groups" else 4, 4 if group <= 128 else 2)
    if tokens > 64:
        return QuantTile(128, _depth(weight, form, 128 // item), 1, 8, 2 if form == "int4" and group > 64 else 4)
    block_k, splits = _depth(weight, form, max(64, 256 // item)), 1
    programs = min(rows, experts) * triton.cdiv(weight.out_features, 64)
    while programs * splits < 2 * num_sms(given.rows.device) and weight.in_features // (block_k * splits * 2) >= 4:
        splits *= 2
    return QuantTile(64, block_k, splits, 8 if given.digits == 2 and tokens > 16 else 4, 4)


def _depth(weight: PackedWeight, form: str, most: int) -> int:
    """Features of a tile: at most `most`, where the weight's groups leave a choice. int4 takes pairs of groups that fill the row."""
    k, group = weight.in_features, weight.group_size
    if form == "int4":
        return largest_block(k, 2 * group, most)
    if form == "groups":
        return largest_block(triton.cdiv(k, group) * group, group, most)
    return group if form == "block" else most


def _combine(y: Tensor, routing: Routing, places: Tensor | None = None) -> Tensor:
    """The sums [T, size] of rows of y, which are choices, or lie at `places` [T × k]."""
    tokens, size = routing.weights.shape[0], y.shape[1]
    out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
    if tokens:
        grid = (tokens, triton.cdiv(size, _BLOCK))
        combine_kernel[grid](y, places, routing.weights, out, size, TOP_K=routing.top_k, BLOCK=_BLOCK, num_warps=4, **pdl_launch_options(y))
    return out
