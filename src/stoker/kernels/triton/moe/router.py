"""The choice of experts on the GPU.

    route           router logits -> Routing: the experts of each token, and all choices sorted by expert
    route_tokens    the same from the tokens and the router's weight, with the norm before it

Few tokens have as few launches as the numbers of tokens, experts and features allow: see the constants. More have four: norm, product,
choice and sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.dense.launch import linear, small_linear
from stoker.kernels.triton.gemm.dense.tiles import MAX_ROWS
from stoker.kernels.triton.gemm.quantized.launch import apply_input_fusion, split_counters
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.moe.router_kernel import router_kernel
from stoker.kernels.triton.moe.router_product_kernel import router_product_kernel
from stoker.kernels.triton.moe.routing_kernels import RoutingOptions, choose_experts_kernel, sort_choices_kernel
from stoker.kernels.triton.norm import norm_warps
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.types import PLAIN, Fusion

MAX_EXPERTS = 1024
# Rows of eight choices that a CTA of `sort_choices_kernel` sorts at a time: two for each of 512 threads.
MAX_SORT_ROWS = 1024
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
# `router_product_kernel`: tokens from which it was measured to be faster, with launches of their own for norm, choice and sort, than
# `router_kernel`, if that needs others for choice and sort, and than the product of `gemm.dense`; tokens up to which it was measured. One
# size of slices for all tokens and experts, so that the logits of a token have the same bits in every batch.
MIN_PRODUCT_TOKENS = 17
MAX_PRODUCT_TOKENS = 8192
PRODUCT_SLICE = 256


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """Choose the experts of each token (`ops.route`). Of experts with equal scores the first one is chosen.

    A token with a NaN logit gets NaN weights. Raises ValueError for more than MAX_EXPERTS experts or groups of unequal size.
    """
    return _route(logits.contiguous()[None], correction, params)


def _route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """`route`, of logits that are the sums of slices: float32 [slices, T, experts], contiguous."""
    slices, tokens, experts = logits.shape
    options = _routing_options(experts, params, slices)
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
    ids = torch.empty((tokens, params.top_k), dtype=torch.int16, device=logits.device)
    if tokens:
        choose_experts_kernel[(tokens,)](
            logits, correction, weights, ids, None, None, None, *numbers, TOKENS=1, OPTIONS=options, num_warps=1, **pdl
        )  # fmt: skip
    rows, warps = _sort_block(ids.numel())
    sort_choices_kernel[(experts + 1,)](
        ids, order, offsets, tokens, TOP_K=params.top_k, ROWS=rows, IS_WHOLE=ids.numel() <= 8 * rows, num_warps=warps, **pdl
    )
    return routing


def _sort_block(choices: int) -> tuple[int, int]:
    """(groups of eight choices that a CTA of `sort_choices_kernel` reads at a time, warps): one group or more for each thread."""
    rows = min(MAX_SORT_ROWS, next_power_of_2(cdiv(max(1, choices), 8)))
    return rows, min(16, max(1, rows // 32))


def route_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, params: RoutingParams, fusion: Fusion = PLAIN
) -> tuple[Tensor, Routing]:
    """x after the norm of `fusion`, and the experts of each token by a router (`ops.route_tokens`).

    One launch of `router_kernel` if it can, four with `router_product_kernel` for more tokens. Sizes and dtypes that neither supports have
    another product: up to MAX_ROWS tokens are widened to float32 in registers, more are converted.
    """
    tokens, features = x.shape
    uses_product = uses_router_product(x, weight, params)
    tile = None if uses_product else router_tile(tokens, len(weight), features, params.num_groups)
    if tile is not None:
        return _route_by_tiles(x, weight, bias, correction, params, fusion, tile)
    x = apply_input_fusion(x, fusion)
    if uses_product:
        return x, _route(router_product(x.contiguous(), weight, bias), correction, params)
    is_widened = 0 < tokens <= MAX_ROWS
    logits = small_linear(x, weight, bias, PLAIN) if is_widened else linear(x.float(), weight, bias)
    return x, route(logits, correction, params)


def uses_router_product(x: Tensor, router: Tensor, params: RoutingParams) -> bool:
    """Whether `router_product` computes the logits of the tokens x: if they are more than `router_kernel` routes in one launch."""
    (tokens, features), experts = x.shape, len(router)
    if not MIN_PRODUCT_TOKENS <= tokens <= MAX_PRODUCT_TOKENS or x.dtype != torch.bfloat16 or not supports(x, "router_product"):
        return False
    tile, options = router_tile(tokens, experts, features, params.num_groups), _routing_options(experts, params)
    return tile is None or not _sorts_choices(_block_tokens(tokens), options)


class ProductTile(NamedTuple):
    """The tile of a CTA of `router_product_kernel`."""

    tokens: int
    experts: int
    warps: int


def product_tile(tokens: int, experts: int, slices: int, num_sms: int) -> ProductTile:
    """The smaller tile while two CTAs per SM are enough, which run at the same time; a larger one reads half of the bytes."""
    if slices * cdiv(tokens, 64) * cdiv(experts, 32) <= 2 * num_sms:
        return ProductTile(64, min(32, max(16, next_power_of_2(experts))), 4)
    return ProductTile(128, min(64, max(16, next_power_of_2(experts))), 8)


def router_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits of tokens x, bfloat16 [T, features], contiguous, as sums over slices of the features: float32 [slices, T, experts]."""
    (tokens, features), experts = x.shape, len(weight)
    slices = cdiv(features, PRODUCT_SLICE)
    tile = product_tile(tokens, experts, slices, num_sms(x.device))
    logits = torch.empty((slices, tokens, experts), dtype=torch.float32, device=x.device)
    router_product_kernel[(slices, cdiv(tokens, tile.tokens), cdiv(experts, tile.experts))](
        x,
        weight,
        bias,
        logits,
        tokens,
        SIZE=features,
        NUM_EXPERTS=experts,
        TOKENS=tile.tokens,
        EXPERTS=tile.experts,
        SLICE=PRODUCT_SLICE,
        num_warps=tile.warps,
        **pdl_launch_options(x),
    )
    return logits


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
    (tokens, features), experts = x.shape, len(weight)
    block, block_tokens, options = next_power_of_2(features), _block_tokens(tokens), _routing_options(experts, params)
    num_warps, choosing, routing = norm_warps(block), 0, None
    choice: tuple[Tensor | None, ...] = (None,) * 6
    if params.num_groups == 1 and _sorts_choices(block_tokens, options):
        routing = _empty_routing(tokens, experts, params.top_k, x.device)
        choosing = block_tokens if block_tokens == 1 and options.block_size <= 32 else max(block_tokens, num_warps)
        choice = split_counters(x.device), correction, routing.weights, routing.order, routing.offsets, routing.experts
    x = x.contiguous()
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

    Groups of experts lie in several warps when there are several tokens, whose reductions wait for each other. More tokens than
    MAX_ROUTER_ROWS have a CTA each, so that the sums of a softmax have one order in all batches.
    """
    if options.num_groups > 1:
        return block_tokens == 1
    return block_tokens <= MAX_ROUTER_ROWS and block_tokens * options.block_size <= MAX_SORTED_SCORES


def _routing_options(experts: int, params: RoutingParams, slices: int = 1) -> RoutingOptions:
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
        slices=slices,
    )
