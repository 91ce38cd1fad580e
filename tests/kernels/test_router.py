"""The choice of experts in the interpreter, compared with its reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.kernels.reference import router as reference
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.gemm.quantized.launch import split_counters
from stoker.kernels.triton.moe import router
from stoker.kernels.types import PLAIN, Fusion

ROUTINGS = [
    (8, RoutingParams(2)),
    (8, RoutingParams(2, score="softmax_topk")),
    (60, RoutingParams(4, renormalize=False)),
    (6, RoutingParams(2, score="sparsemixer", jitter=0.3, renormalize=False)),
    (16, RoutingParams(6, scale=2.5, num_groups=4, top_groups=2)),
    (40, RoutingParams(3, score="sigmoid", num_groups=4, top_groups=2, group_score="top2")),
]


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("experts", "params"), ROUTINGS)
def test_route(experts: int, params: RoutingParams, tokens: int, correction: bool) -> None:
    logits, added = torch.randn(tokens, experts), torch.rand(experts) * 0.1 if correction else None
    got, want = router.route(logits, added, params), reference.route(logits, added, params)
    assert torch.equal(got.order, want.order)
    assert torch.equal(got.offsets, want.offsets)
    assert torch.allclose(got.weights, want.weights, rtol=1e-5)


NORMS = {
    "none": PLAIN,
    "rms": Fusion("rms", torch.rand(200).bfloat16() + 0.5, None, 1e-5),
    "rms without a weight": Fusion("rms", None, None, 1e-5),
    "layer": Fusion("layer", torch.rand(200) + 0.5, torch.randn(200), 1e-5),
}


def normed(x: Tensor, fusion: Fusion) -> Tensor:
    x = x.double()
    if fusion.norm_kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    if fusion.norm_kind is not None:
        x = x / (x.square().mean(-1, keepdim=True) + fusion.norm_eps).sqrt()
    x = x if fusion.norm_weight is None else x * fusion.norm_weight
    return x if fusion.norm_bias is None else x + fusion.norm_bias


# Numbers of tokens with each routing, with a bias and without, and with each norm; each routing with each norm.
ROUTES = [
    (tokens, *routing, biased, list(NORMS)[(i + j + 2 * biased) % 4])
    for (i, tokens), (j, routing), biased in product(
        enumerate([0, 1, 2, 3, 8, 12, 64, 65]), enumerate(ROUTINGS[place] for place in (0, 1, 2, 5)), (False, True)
    )
]


@pytest.mark.parametrize(("tokens", "experts", "params", "biased", "name"), ROUTES)
def test_routes_of_tokens(tokens: int, experts: int, params: RoutingParams, biased: bool, name: str) -> None:
    """As with norms and products in float64, of which no two logits are as near as float32 rounds."""
    x, weight = torch.randn(tokens, 200).bfloat16(), torch.randn(experts, 200) * 200**-0.5
    bias, correction = (torch.randn(experts), torch.rand(experts) * 0.1) if biased else (None, None)
    y, got = router.route_tokens(x, weight, bias, correction, params, NORMS[name])
    assert tokens == 0 or relative_error(y, normed(x, NORMS[name])) < TOLERANCE[torch.bfloat16]
    logits = y.double() @ weight.double().T + (0 if bias is None else bias)
    want = reference.route(logits, correction, params)
    assert torch.equal(got.order, want.order) and torch.equal(got.offsets, want.offsets)
    assert torch.allclose(got.weights, want.weights.float(), rtol=1e-4, atol=1e-6)
    assert not split_counters(x.device).any()


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 33, 64])
@pytest.mark.parametrize("name", NORMS)
def test_one_launch_norms_and_routes_as_several(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits of the normed tokens, and the same routing if a token has a NaN, and if rows of x are not next to each other."""
    x, weight = torch.randn(tokens, 208).bfloat16()[:, :200], torch.randn(40, 200)
    x[tokens // 2, 7] = float("nan")
    monkeypatch.setattr(router, "MIN_PRODUCT_TOKENS", 65)
    y, one = router.route_tokens(x, weight, None, None, RoutingParams(4), NORMS[name])
    monkeypatch.setattr(router, "router_tile", lambda *sizes: None)
    separate, several = router.route_tokens(x, weight, None, None, RoutingParams(4), NORMS[name])
    assert torch.equal(y.view(torch.int16), separate.view(torch.int16))
    assert torch.equal(one.order, several.order) and torch.equal(one.offsets, several.offsets)
    assert torch.allclose(one.weights, several.weights, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2, 5, 64])
@pytest.mark.parametrize(("experts", "params"), ROUTINGS)
def test_one_launch_chooses_and_sorts_as_two(experts: int, params: RoutingParams, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits. Every token has two equal logits, and one token has a NaN."""
    logits = torch.randn(tokens, experts).repeat_interleave(2, 1)[:, :experts].contiguous()
    logits[tokens // 2, 1] = float("nan")
    monkeypatch.setattr(router, "_sorts_choices", lambda block_tokens, options: True)
    one = router.route(logits, None, params)
    monkeypatch.setattr(router, "_sorts_choices", lambda block_tokens, options: False)
    two = router.route(logits, None, params)
    assert torch.equal(one.weights.view(torch.int32), two.weights.view(torch.int32))
    assert torch.equal(one.order, two.order) and torch.equal(one.offsets, two.offsets)
    experts_of = torch.bucketize(torch.arange(two.order.numel()), two.offsets[1:], right=True)
    chosen = torch.empty_like(experts_of).index_copy_(0, two.order.long(), experts_of).view(tokens, -1)
    assert all(len(set(row)) == params.top_k for row in chosen.tolist())


@pytest.mark.parametrize(("experts", "features"), [(32, 2880), (128, 2880), (128, 2048), (8, 4096), (512, 2048), (60, 100)])
def test_tiles_of_the_router_depend_on_the_power_of_two_of_the_tokens(experts: int, features: int) -> None:
    for tokens in range(1, 65):
        traced = min(t for t in (1, 4, 8, 16, 32, 64) if t >= tokens)
        tile = router.router_tile(tokens, experts, features, 1)
        assert tile == router.router_tile(traced, experts, features, 1)
        assert tile is None or -(-experts // tile[0]) * -(-tokens // tile[1]) <= max(experts, router.ROUTER_CTAS)
    assert router.router_tile(65, experts, features, 1) is router.router_tile(0, experts, features, 1) is None


# (tokens, experts, features, SMs, parameters): small and large tiles, for few SMs; one slice of the features and several, of which the
# last may have fewer; experts in one CTA and in several, of which the last may have fewer; a last tile of one token, and a full one.
LARGE_ROUTES = [
    (17, 150, 300, 132, RoutingParams(8)),
    (129, 70, 260, 4, RoutingParams(4)),
    (65, 8, 200, 132, RoutingParams(2)),
    (128, 28, 600, 132, RoutingParams(4, "softmax_topk")),
    (73, 100, 512, 132, RoutingParams(8, renormalize=False)),
    (100, 256, 64, 1, RoutingParams(8, "sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2")),
    (66, 16, 260, 1, RoutingParams(2, "sparsemixer", jitter=0.3, renormalize=False)),
]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("tokens", "experts", "features", "sms", "params"), LARGE_ROUTES)
def test_routes_of_many_tokens(
    tokens: int, experts: int, features: int, sms: int, params: RoutingParams, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with norms and products in float64. Rows of x are not next to each other."""
    monkeypatch.setattr(router, "num_sms", lambda device: sms)
    has_bias, weight = name == "rms", torch.randn(experts, features) * features**-0.5
    is_corrected = params.score == "sigmoid" and name == "layer"
    bias, correction = (torch.randn(experts) if has_bias else None), (torch.rand(experts) * 0.1 if is_corrected else None)
    fusion = NORMS[name]
    if fusion.norm_weight is not None:
        fusion = replace(fusion, norm_weight=torch.rand(features) + 0.5)
    if fusion.norm_bias is not None:
        fusion = replace(fusion, norm_bias=torch.randn(features))
    x = torch.randn(tokens, features + 8).bfloat16()[:, :features]
    assert router.uses_router_product(x, weight, params)
    y, got = router.route_tokens(x, weight, bias, correction, params, fusion)
    assert relative_error(y, normed(x, fusion)) < TOLERANCE[torch.bfloat16]
    want = reference.route(y.double() @ weight.double().T + (0 if bias is None else bias), correction, params)
    assert torch.equal(got.order, want.order) and torch.equal(got.offsets, want.offsets)
    assert torch.allclose(got.weights, want.weights.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("experts", "params"), [*ROUTINGS[:2], ROUTINGS[3], (30, RoutingParams(4, renormalize=False)), (96, RoutingParams(8, "sigmoid"))]
)
def test_many_tokens_are_routed_as_by_the_product_of_the_library(
    experts: int, params: RoutingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal logits of each pair of experts, tokens of which all choose the same experts, and with NaN and infinity in x."""
    x = torch.randn(97, 300).bfloat16()
    weight = torch.randn(experts, 300).repeat_interleave(2, 0)[:experts].contiguous()
    x[20:60] = x[20]
    x[3, 7], x[16, 0], x[96, 299] = float("nan"), float("inf"), float("-inf")
    fusion = Fusion("rms", torch.rand(300).bfloat16() + 0.5, None, 1e-5)
    y, sliced = router.route_tokens(x, weight, None, None, params, fusion)
    monkeypatch.setattr(router, "uses_router_product", lambda *args: False)
    same, whole = router.route_tokens(x, weight, None, None, params, fusion)
    assert torch.equal(y.view(torch.int16), same.view(torch.int16))
    assert torch.equal(sliced.order, whole.order) and torch.equal(sliced.offsets, whole.offsets)
    assert torch.allclose(sliced.weights, whole.weights, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_a_token_is_routed_equally_in_every_batch() -> None:
    """Also with other tokens around it and other neighbours in its tile: with the same bits. `tests/gpu` has both sizes of tiles."""
    x, weight = torch.randn(300, 300).bfloat16(), torch.randn(70, 300)
    fusion = Fusion("rms", None, None, 1e-5)
    y, whole = router.route_tokens(x, weight, None, None, RoutingParams(4), fusion)
    experts = experts_of_choices(whole)
    for start, stop in ((0, 300), (0, 70), (7, 200), (230, 300), (20, 60)):
        part, routing = router.route_tokens(x[start:stop], weight, None, None, RoutingParams(4), fusion)
        assert torch.equal(part, y[start:stop])
        assert torch.equal(routing.weights, whole.weights[start:stop])
        assert torch.equal(experts_of_choices(routing), experts[start:stop])


def experts_of_choices(routing: Routing) -> Tensor:
    """[T, k]"""
    places = torch.bucketize(torch.arange(routing.order.numel()), routing.offsets[1:], right=True)
    return torch.empty_like(places).index_copy_(0, routing.order.long(), places).view(routing.weights.shape)


def test_float32_weights_are_three_bfloat16_digits() -> None:
    """Logits are those of float32 weights, not of rounded ones: two experts differ in the last bit of a weight."""
    x, weight = torch.zeros(65, 64).bfloat16(), torch.full((2, 64), 1 + 2.0**-12)
    x[:, 5] = 1
    weight[1, 5] += 2.0**-23
    routing = router.route_tokens(x, weight, None, None, RoutingParams(1, "softmax_topk"))[1]
    assert routing.offsets.tolist() == [0, 0, 65]


def test_sizes_of_the_router_of_many_tokens() -> None:
    """Tokens that `router_kernel` routes in one launch, more than were measured, and other dtypes have the products of other kernels."""

    def is_supported(tokens: int, experts: int, features: int = 2048, groups: int = 1, dtype: torch.dtype = torch.bfloat16) -> bool:
        x, weight = torch.empty(tokens, features, dtype=dtype), torch.empty(experts, features, device="meta")
        return router.uses_router_product(x, weight, RoutingParams(4, num_groups=groups))

    assert is_supported(65, 32) and is_supported(17, 128) and is_supported(17, 256, 7168, 8) and is_supported(router.MAX_PRODUCT_TOKENS, 8)
    assert not is_supported(64, 32) and not is_supported(16, 128) and not is_supported(router.MAX_PRODUCT_TOKENS + 1, 8)
    assert not is_supported(65, 128, dtype=torch.float16)


def test_tiles_of_the_product_of_a_router() -> None:
    """Two small tiles per SM, and otherwise large ones, with few experts in fewer columns."""
    small, large = router.ProductTile(64, 32, 4), router.ProductTile(128, 64, 8)
    assert [router.product_tile(tokens, 128, 8, 132) for tokens in (17, 512, 513, 8192)] == [small, small, large, large]
    assert [router.product_tile(tokens, 32, 12, 132) for tokens in (1408, 1409)] == [small, router.ProductTile(128, 32, 8)]
    assert [router.product_tile(tokens, 8, 16, 132).experts for tokens in (65, 8192)] == [16, 16]


def test_more_choices_than_are_sorted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_SORT_ROWS", 2)
    monkeypatch.setattr(router, "MAX_SORTED_SCORES", 0)
    logits = torch.randn(21, 8)
    got, want = router.route(logits, None, RoutingParams(3)), reference.route(logits, None, RoutingParams(3))
    assert torch.equal(got.order, want.order) and torch.equal(got.offsets, want.offsets)


@pytest.mark.parametrize("sorts", [True, False])
def test_order_of_special_logits(sorts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers by value, equal ones (both zeros, too) by index, and NaN last."""
    monkeypatch.setattr(router, "_sorts_choices", lambda block_tokens, options: sorts)
    inf, nan, tiny = float("inf"), float("nan"), 1e-45
    special = [0.0, -0.0, tiny, -tiny, 1.0, -1.0, inf, -inf, nan, -nan, 3e38, -3e38, 1.0, nan, -inf, 0.5]
    logits = torch.tensor([special[i:] + special[:i] for i in range(len(special))])
    got = router.route(logits, None, RoutingParams(len(special), "softmax_topk"))
    want = [sorted(range(len(row)), key=lambda e: (row[e] != row[e], -row[e] if row[e] == row[e] else 0, e)) for row in logits.tolist()]
    assert experts_of_choices(got).tolist() == want


def test_a_token_with_nan_is_routed_to_existing_experts() -> None:
    logits = torch.randn(3, 8)
    logits[1, 2] = float("nan")
    got = router.route(logits, None, RoutingParams(2))
    assert got.weights.isnan().any(1).tolist() == [False, True, False]
    assert sorted(got.order.tolist()) == list(range(6))
    assert got.offsets[-1] == 6


def test_groups_of_different_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="10 experts in 4 groups"):
        router.route(torch.zeros(1, 10), None, RoutingParams(2, num_groups=4))
