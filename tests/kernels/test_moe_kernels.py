"""Experts in the interpreter, compared with float64 products of each choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import Group
from stoker.kernels.reference import activation as activation_reference
from stoker.kernels.reference import moe as reference
from stoker.kernels.reference.router import route
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton import activation
from stoker.kernels.triton.aot.offline_target import compilation_target
from stoker.kernels.triton.gemm.large.tiles import NARROW_TILE, TALL_TILE, TILE
from stoker.kernels.triton.moe import grouped_gemm, router
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import ClippedGate


def expected_by_choice(x: Tensor, up: Tensor, up_bias: Tensor | None, routing: Routing, experts: range) -> Tensor:
    """[T × k, N] float64, by choice; zeros for choices of other ranks."""
    out = torch.zeros(routing.order.numel(), up.shape[1], dtype=torch.float64)
    bounds = routing.offsets.tolist()
    for i, _ in enumerate(experts):
        for choice in routing.order[bounds[i] : bounds[i + 1]].tolist():
            out[choice] = up[i].double() @ x[choice].double() + (0 if up_bias is None else up_bias[i].double())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "splits"), [(1, 8, 2, 3), (5, 4, 2, 0), (40, 3, 1, 2)])
def test_projections(tokens: int, experts: int, top_k: int, splits: int, ranks: bool, dtype: torch.dtype) -> None:
    n, k = 24, 70
    x, bias = torch.randn(tokens, k).to(dtype), torch.randn(experts, n).to(dtype)
    weight = (torch.randn(experts, n, k) * k**-0.5).to(dtype)
    routing = route(torch.randn(tokens, experts), None, RoutingParams(top_k))
    local = range(experts)
    if ranks:  # this rank has experts 1 : 3
        local = range(1, 3)
        routing = Routing(routing.weights, routing.order, routing.offsets[1:4].contiguous(), is_whole=False)
    weight, bias = weight[local.start : local.stop], bias[local.start : local.stop]
    tile = QuantTile(16, 32, splits) if splits else None
    by_choice = expected_by_choice(x.repeat_interleave(top_k, 0), weight, bias, routing, local)
    packed = PackedWeight("dense", weight, bias=bias)
    up = moe.expert_up(x, packed, routing, tile=tile)
    assert relative_error(up, by_choice[routing.order.long()]) < TOLERANCE[dtype]
    assert relative_error(reference.expert_up(x, packed, routing), by_choice[routing.order.long()]) < TOLERANCE[dtype]
    down = (torch.randn(len(local), k, n) * n**-0.5).to(dtype)
    inner = up.new_empty(up.shape).index_copy_(0, routing.order.long(), up)
    each = expected_by_choice(inner, down, None, routing, local).unflatten(0, (tokens, top_k))
    want = (each * routing.weights.double()[..., None]).sum(1)
    assert relative_error(moe.expert_down(up, PackedWeight("dense", down), routing, tile=tile), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_added_to_the_rounded_sum(dtype: torch.dtype) -> None:
    """As in two launches, with the same bits."""
    weight, x = PackedWeight("dense", torch.randn(4, 40, 32).to(dtype)), torch.randn(14, 32).to(dtype)
    residual, routing = torch.randn(7, 80).to(dtype)[:, ::2], route(torch.randn(7, 4), None, RoutingParams(2))
    assert torch.equal(moe.expert_down(x, weight, routing, residual), moe.expert_down(x, weight, routing) + residual)
    assert torch.equal(reference.expert_down(x, weight, routing, residual), reference.expert_down(x, weight, routing) + residual)


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_experts_of_one_token_are_not_searched(dtype: torch.dtype, splits: int) -> None:
    """With the bits of a search in the offsets."""
    routing = router.route(torch.randn(1, 9), None, RoutingParams(4))
    assert routing.experts is not None
    assert torch.equal(routing.experts, torch.bucketize(torch.arange(4), routing.offsets[1:], right=True).int())
    searched, tile = replace(routing, experts=None), QuantTile(16, 32, splits) if splits else None
    x, up, down = (torch.randn(*shape).to(dtype) for shape in ((1, 70), (9, 40, 70), (9, 70, 40)))
    weights = PackedWeight("dense", up, bias=torch.randn(9, 40).to(dtype)), PackedWeight("dense", down)
    inner = moe.expert_up(x, weights[0], routing, tile=tile)
    assert torch.equal(inner, moe.expert_up(x, weights[0], searched, tile=tile))
    assert torch.equal(moe.expert_down(inner, weights[1], routing, tile=tile), moe.expert_down(inner, weights[1], searched, tile=tile))


def test_the_number_of_tiles_is_that_of_the_worst_routing() -> None:
    for segments, tokens in product((1, 2, 3), (1, 2, 4)):
        for rows in range(1, 13):
            routings = [c for c in product(range(rows + 1), repeat=segments) if sum(c) == rows]
            most = max(sum(-(-count // tokens) for count in counts) for counts in routings)
            assert moe.max_token_tiles(rows, segments, tokens) == most


@pytest.mark.parametrize("tile_tokens", [8, 16, 64])
def test_tiles_of_any_number_of_tokens(tile_tokens: int) -> None:
    """Experts with several tiles, with one that is not full, and with one row in the last tile: 17, 3, 1 and 19 rows."""
    weight = (torch.randn(4, 24, 70) * 70**-0.5).bfloat16()
    offsets = torch.tensor([0, 17, 20, 21, 40], dtype=torch.int32)
    routing = Routing(torch.rand(40, 1), torch.randperm(40).int(), offsets)
    x = torch.randn(40, 70).bfloat16()
    want = expected_by_choice(x, weight, None, routing, range(4))
    packed = PackedWeight("dense", weight)
    up = moe.expert_up(x, packed, routing, tokens=tile_tokens)
    assert relative_error(up, want[routing.order.long()]) < TOLERANCE[torch.bfloat16]
    down = moe.expert_down(x.index_select(0, routing.order.long()), packed, routing, tokens=tile_tokens)
    assert relative_error(down, want * routing.weights.double()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "activations"), [(torch.int8, "none"), (torch.int8, "token"), (torch.float8_e4m3fn, "token"), (torch.float8_e4m3fn, "static")]
)
@pytest.mark.parametrize("tokens", [6])
def test_quantized_projections(tokens: int, dtype: torch.dtype, activations: str) -> None:
    experts, top_k, n, k = 4, 2, 24, 64
    weight = (torch.randn(experts, n, k) * 40).clamp(-127, 127).to(dtype)
    step = torch.tensor([0.02]) if activations == "static" else None
    bias, x = torch.randn(experts, n), torch.randn(tokens, k)
    options = {"activations": activations, "input_scale": step}
    name = "int8" if dtype == torch.int8 else "fp8"
    stored = PackedWeight(name, weight, torch.rand(experts, n) * 0.01 + 0.001, bias=bias, **options)  # type: ignore[arg-type]
    routing = route(torch.randn(tokens, experts), None, RoutingParams(top_k))
    up = moe.expert_up(x, stored, routing)
    assert relative_error(up, reference.expert_up(x, stored, routing)) < 3e-4
    transposed = weight.transpose(1, 2).contiguous()
    down = PackedWeight(name, transposed, torch.rand(experts, k) * 0.01 + 0.001, **options)  # type: ignore[arg-type]
    assert relative_error(moe.expert_down(up, down, routing), reference.expert_down(up, down, routing)) < 3e-4


@pytest.mark.parametrize("form", ["dense", "int8", "fp8", "fp8, static", "fp8, grouped", "dense, grouped", "fp8, unquantized rows"])
def test_the_gate_before_the_last_projection(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the launch that quantizes the rows, with the bits of a launch of its own."""
    if "grouped" in form:
        emulate_grouped_gemm(monkeypatch, 5)
    tokens, experts, top_k, n, k = 11, 4, 2, 32, 64
    routing, wide = route(torch.randn(tokens, experts), None, RoutingParams(top_k)), torch.randn(2 * tokens, 2 * k).bfloat16()
    name = form.split(",")[0]
    if name == "dense":
        weight = PackedWeight("dense", torch.randn(experts, n, k).bfloat16() / 8)
    else:
        stored = (torch.randn(experts, n, k) * 40).clamp(-127, 127).to(torch.int8 if name == "int8" else torch.float8_e4m3fn)
        step = torch.tensor([0.02]) if "static" in form else None
        activations = "none" if "unquantized" in form else "token" if step is None else "static"
        weight = PackedWeight(name, stored, torch.rand(experts, n) / 8, activations=activations, input_scale=step)  # type: ignore[arg-type]
    assert grouped_gemm.is_supported(wide, weight, routing) is ("grouped" in form)
    residual, inner = torch.randn(tokens, n).bfloat16(), activation.gated(wide, "silu")
    found = moe.expert_down(wide, weight, routing, residual, "silu")
    assert torch.equal(found, moe.expert_down(inner, weight, routing, residual))
    assert torch.equal(reference.expert_down(wide, weight, routing, None, "silu"), reference.expert_down(
        activation_reference.gated(wide, "silu"), weight, routing
    ))  # fmt: skip
    if name == "dense":
        exact = torch.nn.functional.silu(wide[:, :k].double()) * wide[:, k:].double()
        by_choice = exact.new_empty(exact.shape).index_copy_(0, routing.order.long(), exact)
        each = expected_by_choice(by_choice, weight.values, None, routing, range(experts)).unflatten(0, (tokens, top_k))
        assert relative_error(found, (each * routing.weights.double()[..., None]).sum(1) + residual) < TOLERANCE[torch.bfloat16]


class TwoRanks(Group):
    """Two ranks, of which the other one has the same summand. Without inboxes, like devices that cannot access each other's memory."""

    size = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2


def test_experts_of_ranks_without_inboxes() -> None:
    """The sum of a token is rounded before it is summed over ranks, and the residual is added at last."""
    weight, x = PackedWeight("dense", torch.randn(4, 40, 32).bfloat16()), torch.randn(14, 32).bfloat16()
    residual, routing = torch.randn(7, 40).bfloat16(), route(torch.randn(7, 4), None, RoutingParams(2))
    for module in (moe, reference):
        total = module.expert_down(x, weight, routing)
        assert torch.equal(module.expert_down(x, weight, routing, residual, None, TwoRanks()), total * 2 + residual)
        assert torch.equal(module.expert_down(x, weight, routing, None, None, TwoRanks()), total * 2)


def test_clipped_gate() -> None:
    x, gate = torch.randn(5, 96) * 8, ClippedGate(7.0, 1.702)
    left, right = x.double()[:, :48].clamp(max=7.0), x.double()[:, 48:].clamp(-7.0, 7.0)
    want = (right + 1) * left / (1 + torch.exp(-1.702 * left))
    assert relative_error(activation.gated(x, gate), want) < 1e-6
    assert relative_error(activation_reference.gated(x, gate), want) < 1e-6


def test_no_tokens() -> None:
    routing = router.route(torch.zeros(0, 4), None, RoutingParams(2))
    assert routing.offsets.tolist() == [0] * 5
    assert moe.expert_down(torch.zeros(0, 8), PackedWeight("dense", torch.zeros(4, 6, 8)), routing).shape == (0, 6)


def grouped_product(
    rows: Tensor, weight: Tensor, tile: object, *, offsets: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`large_gemm` of experts, which the interpreter cannot run."""
    out = torch.zeros(len(rows), weight.shape[1])
    for i, (start, stop) in enumerate(pairwise(offsets.tolist())):
        out[start:stop] = rows[start:stop].float() @ weight[i].float().T
        if x_scale is not None and weight_scale is not None:
            out[start:stop] *= x_scale[start:stop, None] * weight_scale[i]
        if bias is not None:
            out[start:stop] += bias[i].float()
    return out.bfloat16()


def emulate_grouped_gemm(monkeypatch: pytest.MonkeyPatch, min_rows: int) -> None:
    """Use the grouped GEMM from `min_rows` rows per expert."""
    monkeypatch.setattr(grouped_gemm, "large_gemm", grouped_product)
    monkeypatch.setattr(grouped_gemm, "supports_experts", lambda weight: True)
    monkeypatch.setattr(grouped_gemm, "MIN_ROWS", min_rows)


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("activations", [None, "token", "static"])
def test_grouped_gemm_for_many_rows_per_expert(activations: str | None, gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results equal those of the tiles: rows are in the order of the choices, and summed by token. One expert has no row."""
    emulate_grouped_gemm(monkeypatch, 9)
    experts, n, k, tokens = 5, 32, 64, 23
    logits = torch.randn(tokens, experts)
    logits[:, 2] = -100.0
    x, routing = torch.randn(tokens, k).bfloat16(), route(logits, None, RoutingParams(2))

    def pack(*shape: int) -> PackedWeight:
        weight, bias = torch.randn(experts, *shape), torch.randn(experts, shape[0]).bfloat16()
        if activations is None:
            return PackedWeight("dense", weight.bfloat16() / 8, bias=bias)
        step = torch.tensor([0.02]) if activations == "static" else None
        options = {"bias": bias, "activations": activations, "input_scale": step}
        return PackedWeight("fp8", weight.to(torch.float8_e4m3fn), torch.rand(experts, shape[0]) / 8, **options)  # type: ignore[arg-type]

    up, down = pack(n, k), pack(k, n)
    assert grouped_gemm.is_supported(x, up, routing)
    got = moe.expert_up(x, up, routing)
    assert relative_error(got, moe.expert_up(x, up, routing, tile=QuantTile(16, 32))) < 1e-2
    inner, residual = torch.randn(2 * tokens, 2 * n if gate else n).bfloat16(), torch.randn(tokens, k).bfloat16()
    tiled = moe.expert_down(inner, down, routing, residual, gate, tile=QuantTile(16, 32))
    assert relative_error(moe.expert_down(inner, down, routing, residual, gate), tiled) < 1e-2


def test_products_that_the_grouped_gemm_supports() -> None:
    """On an H200: bfloat16 and FP8 with quantized rows, from 64 rows per expert on, and choices that are all of this rank."""

    def is_supported(form: str, tokens: int, n: int = 64, k: int = 64, dtype: torch.dtype = torch.bfloat16, is_whole: bool = True) -> bool:
        weights, order, offsets = (torch.empty(size, device="meta") for size in ((tokens, 2), (tokens * 2,), (9,)))
        kind = {"dense": torch.bfloat16, "int8": torch.int8}.get(form, torch.float8_e4m3fn)
        values, scale = torch.empty(8, n, k, dtype=kind, device="meta"), torch.empty(8, n, device="meta")
        activations = "none" if form == "unquantized rows" else "token"
        name = form if form in ("dense", "int8") else "fp8"
        weight = PackedWeight("dense", values) if form == "dense" else PackedWeight(name, values, scale, activations=activations)  # type: ignore[arg-type]
        routing = Routing(weights, order, offsets, is_whole=is_whole)
        with compilation_target(90):
            return grouped_gemm.is_supported(torch.empty(tokens, k, dtype=dtype, device="meta"), weight, routing)

    for form in ("dense", "fp8"):
        assert is_supported(form, 256) and is_supported(form, 8192)
        assert not is_supported(form, 255)
        assert not is_supported(form, 256, dtype=torch.float16)
        assert not is_supported(form, 256, is_whole=False)
        assert not is_supported(form, 256, n=68)
        assert not is_supported(form, 256, k=68)
    assert not is_supported("int8", 256)
    assert not is_supported("unquantized rows", 256)


def test_tiles_of_the_grouped_gemm() -> None:
    """The tile depends on the mean number of rows per expert, which is rounded up."""
    rows = (64 * 8, 120 * 8, 120 * 8 + 1, 176 * 8, 176 * 8 + 1, 4096 * 8)
    assert [grouped_gemm.tile_of(count, 8) for count in rows] == [NARROW_TILE, NARROW_TILE, TALL_TILE, TALL_TILE, TILE, TILE]


def test_places_of_choices() -> None:
    for choices in (0, 1, 1500):
        order = torch.randperm(choices).int()
        places = moe.inverse_order(Routing(torch.ones(choices, 1), order, torch.tensor([0, choices]).int()))
        assert torch.equal(order[places.long()], torch.arange(choices).int())
