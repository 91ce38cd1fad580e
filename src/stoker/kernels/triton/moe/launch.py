"""Mixture of experts on the GPU. The chosen experts and their rows are computed on the device and never read by the host.

    route           router logits -> Routing: the experts of each token, and all choices sorted by expert
    route_tokens    the same from the tokens and the router's weight, with the norm before it
    expert_up       x [T, k], a row per token -> [T × top_k, n], a row per sorted choice
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
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.all_reduce import all_reduce, all_reduce_choices
from stoker.kernels.triton.all_reduce_kernel import Choices
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.dense.launch import linear, small_linear
from stoker.kernels.triton.gemm.dense.tiles import MAX_ROWS
from stoker.kernels.triton.gemm.quantized.arguments import OutputPointers, QuantizedWeightFormat
from stoker.kernels.triton.gemm.quantized.fp4 import CHUNK
from stoker.kernels.triton.gemm.quantized.launch import (
    gemm_tile,
    product_format,
    quantized_weight_format,
    split_counters,
    split_k_pointers,
    weight_pointers,
)
from stoker.kernels.triton.gemm.quantized.tiles import largest_block
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.moe import grouped_gemm
from stoker.kernels.triton.moe.kernel import ExpertOptions, expert_linear_kernel
from stoker.kernels.triton.moe.large_router_kernel import large_router_kernel
from stoker.kernels.triton.moe.operands import ExpertOperands, expert_operands
from stoker.kernels.triton.moe.router_kernel import router_kernel
from stoker.kernels.triton.moe.routing_kernels import (
    RoutingOptions,
    choose_experts_kernel,
    clipped_gate_kernel,
    combine_kernel,
    invert_order_kernel,
    place_choices_kernel,
    sort_choices_kernel,
)
from stoker.kernels.triton.norm import norm, norm_warps
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import PLAIN, Fusion

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
MAX_EXPERTS = 1024
# Scores (tokens × experts, both rounded up to powers of two) that one CTA ranks and sorts, instead of a CTA per token and another launch:
# 64 tokens of gpt-oss' 32 experts, 16 of 128 experts. Eight warps then have eight scores per thread.
MAX_SORTED_SCORES = 2048
# `router_kernel` with a CTA for each expert: multiplications of all CTAs, and elements of the tile that a CTA normalizes. 8 tokens of
# gpt-oss-20b and of Qwen3-30B-A3B. Each CTA reads all tokens: those of Qwen3 read 4 MB from L2.
MAX_ROUTER_WORK = 1 << 21
MAX_ROUTER_TILE = 1 << 15
# The same with several experts per CTA: tokens, and CTAs, about one for each SM. Separate launches of norm, conversion and router took
# 26 µs for 64 rows of gpt-oss-20b and 21 for Qwen3-30B-A3B: few CTAs multiplied, and one of them added up the slices of all.
MAX_ROUTER_ROWS = 64
ROUTER_CTAS = 136
# `large_router_kernel`: features for which its tiles fit into shared memory and registers; tokens, experts, and bytes of the router that
# all CTAs read from L2, up to which it was measured to be faster. A CTA takes 3 to 4 µs for eight experts, so that 128 take as long as the
# library's product and the choice, or longer (benchmarks/results/h200_router.json).
MAX_LARGE_ROUTER_ROWS = 1024
MAX_LARGE_ROUTER_FEATURES = 4096
MAX_LARGE_ROUTER_EXPERTS = 32
MAX_LARGE_ROUTER_BYTES = 24 << 20
LARGE_ROUTER_WARPS = 16
LARGE_ROUTER_CHUNK = 8


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """Choose the experts of each token (`ops.route`). Of experts with equal scores the first one is chosen.

    A token with a NaN logit gets NaN weights. Raises ValueError for more than MAX_EXPERTS experts or groups of unequal size.
    """
    tokens, experts = logits.shape
    logits, options = logits.contiguous(), _routing_options(experts, params)
    routing = _empty_routing(tokens, experts, params.top_k, logits.device)
    weights, order, offsets = routing.weights, routing.order, routing.offsets
    numbers, pdl = (tokens, params.scale, params.jitter), pdl_launch_options(logits)
    block_tokens = _block_tokens(tokens)
    if tokens and _sorts_choices(block_tokens, options):
        choose_experts_kernel[(1,)](
            logits, correction, weights, None, order, offsets, routing.experts, *numbers, TOKENS=block_tokens, OPTIONS=options,
            num_warps=min(8, block_tokens), **pdl,
        )  # fmt: skip
        return routing
    ids = torch.empty((tokens, params.top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        choose_experts_kernel[(tokens,)](
            logits, correction, weights, ids, None, None, None, *numbers, TOKENS=1, OPTIONS=options, num_warps=1, **pdl
        )  # fmt: skip
    block = min(_BLOCK, next_power_of_2(max(1, ids.numel())))
    sort_choices_kernel[(experts + 1,)](ids, order, offsets, ids.numel(), BLOCK=block, num_warps=max(1, block // 256), **pdl)
    return routing


def route_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, params: RoutingParams, fusion: Fusion = PLAIN
) -> tuple[Tensor, Routing]:
    """x after the norm of `fusion`, and the experts of each token by a router (`ops.route_tokens`).

    One launch up to 64 tokens and two up to 1,024, for few experts. Otherwise up to MAX_ROWS tokens are widened to
    float32 in registers.
    """
    tokens, features = x.shape
    tile = router_tile(tokens, len(weight), features, params.num_groups)
    if tile is not None:
        return _route_by_tiles(x, weight, bias, correction, params, fusion, tile)
    large_tile = large_router_tile(x, weight, params)
    if large_tile is not None:
        return _route_by_large_tiles(x, weight, bias, correction, params, fusion, large_tile)
    if fusion.norm_kind is not None:
        x = norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
    is_widened = 0 < tokens <= MAX_ROWS
    logits = small_linear(x, weight, bias, PLAIN) if is_widened else linear(x.float(), weight, bias)
    return x, route(logits, correction, params)


def router_tile(tokens: int, experts: int, features: int, num_groups: int) -> tuple[int, int] | None:
    """(experts, tokens) of a CTA of `router_kernel`; None: it does not support the sizes, or needs more CTAs than run at a time.

    Equal for all numbers of tokens that are rounded up to the same power of two, of which a build traces one.
    """
    block, block_tokens = next_power_of_2(features), _block_tokens(tokens)
    is_small = block_tokens * features * experts <= MAX_ROUTER_WORK and block_tokens * block <= MAX_ROUTER_TILE
    if 0 < tokens <= 8 and is_small and num_groups == 1:
        return 1, block_tokens
    if not 0 < tokens <= MAX_ROUTER_ROWS or block > 4096:
        return None
    per_cta, each = (4, 4) if block > 2048 else (8, 8)  # a thread has eight features of each row, and up to 128 registers in 16 warps
    ctas = cdiv(experts, per_cta) * cdiv(block_tokens, each)
    if ctas > ROUTER_CTAS:
        return None
    while ctas * 2 <= ROUTER_CTAS and per_cta > 1:
        ctas *= 2
        per_cta, each = (per_cta, each // 2) if each > 4 else (per_cta // 2, each)
    return per_cta, each


def _route_by_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    params: RoutingParams,
    fusion: Fusion,
    tile: tuple[int, int],
) -> tuple[Tensor, Routing]:
    """`route_tokens` by `router_kernel`, which chooses the experts if one CTA can sort the choices, and else by `route`."""
    x = x.contiguous()
    (tokens, features), experts = x.shape, len(weight)
    block, block_tokens, options = next_power_of_2(features), _block_tokens(tokens), _routing_options(experts, params)
    num_warps, choosing, routing = norm_warps(block), 0, None
    choice: tuple[Tensor | None, ...] = (None,) * 6
    if params.num_groups == 1 and _sorts_choices(block_tokens, options):
        routing = _empty_routing(tokens, experts, params.top_k, x.device)
        choosing = block_tokens if block_tokens == 1 and options.block_size <= 32 else max(block_tokens, num_warps)
        choice = split_counters(x.device), correction, routing.weights, routing.order, routing.offsets, routing.experts
    y = None if fusion.norm_kind is None else torch.empty_like(x)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    router_kernel[(cdiv(experts, tile[0]), cdiv(tokens, tile[1]))](
        x,
        fusion.norm_weight,
        fusion.norm_bias if fusion.norm_kind == "layer" else None,
        y,
        weight,
        bias,
        logits,
        *choice,
        tokens,
        fusion.norm_eps,
        params.scale,
        params.jitter,
        SIZE=features,
        RMS=fusion.norm_kind != "layer",
        TOKENS=tile[1],
        EXPERTS=tile[0],
        CHOOSING=choosing,
        BLOCK=block,
        OPTIONS=options,
        num_warps=num_warps,
        **pdl_launch_options(x),
    )
    return x if y is None else y, routing or route(logits, correction, params)


class LargeRouterTile(NamedTuple):
    """Constants of `large_router_kernel`."""

    tokens: int
    part: int  # features
    stages: int


def large_router_tile(x: Tensor, router: Tensor, params: RoutingParams) -> LargeRouterTile | None:
    """The tile of `large_router_kernel`, which depends on the features only; None: it does not support the sizes, or is slower.

    y and the stages of the router fill the shared memory: 16 × 2,048 × 2 bytes and two stages of 8 × 2,048 × 4 bytes, for example.
    """
    (tokens, features), experts = x.shape, len(router)
    if params.num_groups > 1 or x.dtype != torch.bfloat16 or not supports(x, "large_router"):
        return None
    if not MAX_ROUTER_ROWS < tokens <= MAX_LARGE_ROUTER_ROWS or features > MAX_LARGE_ROUTER_FEATURES or experts > MAX_LARGE_ROUTER_EXPERTS:
        return None
    tile_tokens = 16 if features <= 3072 else 8
    if cdiv(tokens, tile_tokens) * router.numel() * router.element_size() > MAX_LARGE_ROUTER_BYTES:
        return None
    return LargeRouterTile(tile_tokens, min(1024, max(256, next_power_of_2(features))), 3 if features <= 2048 else 2)


def _route_by_large_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    params: RoutingParams,
    fusion: Fusion,
    tile: LargeRouterTile,
) -> tuple[Tensor, Routing]:
    """`route_tokens` in two launches: `large_router_kernel` and `place_choices_kernel`."""
    x = x.contiguous()
    (tokens, features), experts = x.shape, len(weight)
    options, routing = _routing_options(experts, params), _empty_routing(tokens, experts, params.top_k, x.device)
    tiles, all_chunks = cdiv(tokens, tile.tokens), cdiv(experts, LARGE_ROUTER_CHUNK)
    chunks = cdiv(all_chunks, max(1, num_sms(x.device) // tiles))  # at most one CTA per SM, if the tiles are not more
    y = None if fusion.norm_kind is None else torch.empty_like(x)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    slots = torch.empty((tokens, experts), dtype=torch.int8, device=x.device)
    counts = torch.empty((tiles, experts), dtype=torch.int32, device=x.device)
    pdl = pdl_launch_options(x)
    large_router_kernel[(cdiv(all_chunks, chunks), tiles)](
        x,
        fusion.norm_weight,
        fusion.norm_bias if fusion.norm_kind == "layer" else None,
        y,
        weight,
        bias,
        logits,
        split_counters(x.device),
        correction,
        routing.weights,
        slots,
        counts,
        tokens,
        chunks,
        fusion.norm_eps,
        params.scale,
        params.jitter,
        SIZE=features,
        RMS=fusion.norm_kind != "layer",
        TOKENS=tile.tokens,
        SLICES=LARGE_ROUTER_WARPS,
        PART=tile.part,
        CHUNK=LARGE_ROUTER_CHUNK,
        STAGES=tile.stages,
        OPTIONS=options,
        num_warps=LARGE_ROUTER_WARPS,
        **pdl,
    )
    place_choices_kernel[(tiles,)](
        slots, counts, routing.order, routing.offsets, tokens, tiles,
        TOKENS=tile.tokens, NUM_EXPERTS=experts, TOP_K=params.top_k, BLOCK=options.block_size, TILES=32, num_warps=4, **pdl,
    )  # fmt: skip
    return x if y is None else y, routing


def _empty_routing(tokens: int, experts: int, top_k: int, device: torch.device) -> Routing:
    """Memory for the result of a routing kernel."""
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    order = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device)
    return Routing(weights, order, offsets, experts=torch.empty_like(order) if tokens == 1 else None)


def _block_tokens(tokens: int) -> int:
    """The tokens of a CTA that routes all `tokens` tokens: rounded up to a power of two, and of 2 tokens as of 4: fewer kernels."""
    return 1 if tokens == 1 else max(4, next_power_of_2(tokens))


def _sorts_choices(block_tokens: int, options: RoutingOptions) -> bool:
    """Whether one CTA chooses the experts of all tokens and sorts the choices.

    Groups of experts lie in several warps when there are several tokens, whose reductions wait for each other.
    """
    if options.num_groups > 1:
        return block_tokens == 1
    return block_tokens * options.block_size <= MAX_SORTED_SCORES


def _routing_options(experts: int, params: RoutingParams) -> RoutingOptions:
    """The constants of the routing kernels.

    Raises ValueError for more than MAX_EXPERTS experts or groups of unequal size.
    """
    if experts > MAX_EXPERTS or experts % params.num_groups:
        raise ValueError(
            f"routing over {experts} experts in {params.num_groups} groups: the number of experts must be at most {MAX_EXPERTS} "
            "and a multiple of the number of groups"
        )
    return RoutingOptions(
        num_experts=experts,
        top_k=params.top_k,
        score=params.score,
        renormalize=params.renormalize,
        num_groups=params.num_groups,
        top_groups=params.top_groups,
        top2=params.group_score == "top2",
        block_groups=next_power_of_2(params.num_groups),
        block_size=next_power_of_2(experts // params.num_groups),
        block_k=next_power_of_2(params.top_k),
    )


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
