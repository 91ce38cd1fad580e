"""The choice of experts on the GPU.

    route           router logits -> Routing: the experts of each token, and all choices sorted by expert
    route_tokens    the same from the tokens and the router's weight, with the norm before it

Both have as few launches as the numbers of tokens, experts and features allow: see the constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.device import num_sms, supports
from stoker.kernels.triton.gemm.dense.launch import linear, small_linear
from stoker.kernels.triton.gemm.dense.tiles import MAX_ROWS
from stoker.kernels.triton.gemm.quantized.launch import split_counters
from stoker.kernels.triton.integers import cdiv, next_power_of_2
from stoker.kernels.triton.moe.large_router_kernel import large_router_kernel
from stoker.kernels.triton.moe.router_kernel import router_kernel
from stoker.kernels.triton.moe.routing_kernels import RoutingOptions, choose_experts_kernel, place_choices_kernel, sort_choices_kernel
from stoker.kernels.triton.norm import norm, norm_warps
from stoker.kernels.triton.pdl import pdl_launch_options
from stoker.kernels.types import PLAIN, Fusion

_BLOCK = 1024
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

    One launch up to 64 tokens and two up to 1,024, for few experts. Otherwise up to MAX_ROWS tokens are widened to float32 in registers.
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
    (tokens, features), experts = x.shape, len(weight)
    block, block_tokens, options = next_power_of_2(features), _block_tokens(tokens), _routing_options(experts, params)
    num_warps, choosing, routing = norm_warps(block), 0, None
    choice: tuple[Tensor | None, ...] = (None,) * 6
    if params.num_groups == 1 and _sorts_choices(block_tokens, options):
        routing = _empty_routing(tokens, experts, params.top_k, x.device)
        choosing = block_tokens if block_tokens == 1 and options.block_size <= 32 else max(block_tokens, num_warps)
        choice = split_counters(x.device), correction, routing.weights, routing.order, routing.offsets, routing.experts
    operands = _operands(x, weight, bias, fusion)
    router_kernel[(cdiv(experts, tile[0]), cdiv(tokens, tile[1]))](
        *operands,
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
    return operands.normed, routing or route(operands.logits, correction, params)


class RouterOperands(NamedTuple):
    """The first arguments of `router_kernel` and `large_router_kernel`."""

    x: Tensor  # [T, features], contiguous
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    y: Tensor | None  # [T, features]: x after the norm, or None without one
    weight: Tensor
    bias: Tensor | None
    logits: Tensor  # float32 [T, experts]

    @property
    def normed(self) -> Tensor:
        """x after the norm, if there is one."""
        return self.x if self.y is None else self.y


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> RouterOperands:
    """The operands of a router, with memory for y and the logits."""
    x = x.contiguous()
    y = None if fusion.norm_kind is None else torch.empty_like(x)
    norm_bias = fusion.norm_bias if fusion.norm_kind == "layer" else None
    logits = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
    return RouterOperands(x, fusion.norm_weight, norm_bias, y, weight, bias, logits)


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
    (tokens, features), experts = x.shape, len(weight)
    options, routing = _routing_options(experts, params), _empty_routing(tokens, experts, params.top_k, x.device)
    tiles, all_chunks = cdiv(tokens, tile.tokens), cdiv(experts, LARGE_ROUTER_CHUNK)
    chunks = cdiv(all_chunks, max(1, num_sms(x.device) // tiles))  # at most one CTA per SM, if the tiles are not more
    operands = _operands(x, weight, bias, fusion)
    slots = torch.empty((tokens, experts), dtype=torch.int8, device=x.device)
    counts = torch.empty((tiles, experts), dtype=torch.int32, device=x.device)
    pdl = pdl_launch_options(x)
    large_router_kernel[(cdiv(all_chunks, chunks), tiles)](
        *operands,
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
    return operands.normed, routing


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
