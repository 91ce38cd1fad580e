"""Int4, grouped int8 and block FP8 experts in the interpreter: random ragged routings, compared with float64 products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import FP4_SCALES, TOLERANCE, fp4_expert_of_every_scale, relative_error
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import moe as reference
from stoker.kernels.reference.activation import ACTIVATIONS
from stoker.kernels.reference.quant_fp8 import round_groups, widen_blocks
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.routing import Routing
from stoker.kernels.triton.gemm.quantized import fp4
from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
from stoker.kernels.triton.gemm.quantized import launch as quant_linear
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.triton.moe import operands as moe_operands
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import ClippedGate, Gate

pytestmark = pytest.mark.slow

EXPERTS = 5
# (rows of each expert, rows of earlier ranks, rows of later ranks): experts without rows, with full tiles, and with several tiles.
ROUTINGS = {
    "one": ([0, 1, 0, 0, 1], 0, 0),
    "all": ([3, 0, 9, 1, 5], 0, 0),
    "rank": ([0, 2, 12, 0, 1], 4, 5),
    "other ranks": ([0] * 5, 2, 2),
}


def random_routing(counts: list[int], before: int, after: int, top_k: int = 2) -> Routing:
    """Choices in random order: which token a choice belongs to does not depend on its expert."""
    total = sum(counts) + before + after
    offsets = torch.tensor([0, *counts]).cumsum(0).int() + before
    return Routing(torch.rand(total // top_k, top_k), torch.randperm(total).int(), offsets, is_whole=not before and not after)


def int4(n: int, k: int, group: int, zero: str, ordered: bool = False) -> tuple[PackedWeight, Tensor]:
    """(packed experts, the real weights: float64 [EXPERTS, n, k], features in the order of x)."""
    groups = -(-k // group)
    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8)
    scale = ((torch.rand(EXPERTS, n, groups) + 0.5) / (5 * k**0.5)).half()
    zeros = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if zero == "int" else None
    if zero == "float":
        zeros = (-torch.rand(scale.shape) / k**0.5).half()
    if zero == "e2m1":
        scale = torch.randint(-7, -3, scale.shape).float().exp2().bfloat16()
    row_scale = torch.rand(EXPERTS, n) + 0.5 if zero == "e2m1" and group == 16 else None
    stored = PackedWeight("int4", codes, scale, zeros, group, is_fp4=zero == "e2m1", row_scale=row_scale)
    real = torch.stack([dequantize_int4(stored.expert(e), torch.float64) for e in range(EXPERTS)])
    order = torch.stack([torch.randperm(k) for _ in range(EXPERTS)])
    if ordered:
        real = torch.empty_like(real).scatter_(2, order[:, None].expand_as(real), real)
    return replace(quant_int4.prepare_weight(stored), column_order=order.int() if ordered else None), real


def int8_groups(n: int, k: int, group: int, shifted: bool) -> tuple[PackedWeight, Tensor]:
    codes = torch.randint(-127, 128, (EXPERTS, n, k), dtype=torch.int8)
    scale = (torch.rand(EXPERTS, n, -(-k // group)) + 0.5) / (80 * k**0.5)
    offset = torch.randn(scale.shape) / k**0.5 if shifted else None
    wide, low = (
        t.double().repeat_interleave(group, 2)[..., :k] for t in (scale, torch.zeros(()).expand_as(scale) if offset is None else offset)
    )
    return PackedWeight("int8", codes, scale, offset, group), codes.double() * wide + low


def blocks(n: int, k: int, block: tuple[int, int]) -> tuple[PackedWeight, Tensor]:
    weight = (torch.randn(EXPERTS, n, k) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (torch.rand(EXPERTS, -(-n // block[0]), -(-k // block[1])) + 0.5) / (60 * k**0.5)
    packed = PackedWeight("fp8", weight, scale, group_size=block[1], block_rows=block[0], activations="group")
    return packed, torch.stack([widen_blocks(packed.expert(e)) for e in range(EXPERTS)]).double()


def expected_rows(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """float64 of sorted rows; zeros for rows of other ranks."""
    out = torch.zeros(len(x), weight.shape[1], dtype=torch.float64)
    for e, (start, stop) in enumerate(zip(routing.offsets[:-1].tolist(), routing.offsets[1:].tolist(), strict=True)):
        out[start:stop] = x[start:stop].double() @ weight[e].T + (0 if bias is None else bias[e].double())
    return out


def combined(sorted_rows: Tensor, routing: Routing) -> Tensor:
    by_choice = torch.empty_like(sorted_rows).index_copy_(0, routing.order.long(), sorted_rows)
    return (by_choice.unflatten(0, routing.weights.shape) * routing.weights.double()[..., None]).sum(1)


def check(
    weight: PackedWeight, real: Tensor, routing: Routing, dtype: torch.dtype, bound: float, tile: QuantTile | None = None,
    rounded: object = lambda x: x,
) -> None:  # fmt: skip
    """An up and a down projection by the same experts. `rounded` rounds the activations as the projection does."""
    _, n, k = real.shape
    bias = torch.randn(EXPERTS, n).to(dtype)
    weight = replace(weight, bias=bias)
    tokens = torch.randn(routing.weights.shape[0], k + 8).to(dtype)[:, :k]
    want = expected_rows(rounded(tokens)[routing.order.long() // routing.top_k], real, bias, routing)  # type: ignore[operator]
    assert relative_error(moe.expert_up(tokens, weight, routing, tile=tile), want) <= bound
    choices = torch.randn(routing.order.shape[0], k).to(dtype)
    want = combined(expected_rows(rounded(choices), real, bias, routing), routing)  # type: ignore[operator]
    assert relative_error(moe.expert_down(choices, weight, routing, tile=tile), want) <= bound
    assert not quant_linear.split_counters(tokens.device).any()


@pytest.mark.parametrize(
    ("routed", "zero", "group", "k"),
    [
        ("one", "none", 32, 192), ("one", "e2m1", 32, 192), ("rank", "e2m1", 16, 66),
        ("one", "float", 64, 130), ("all", "int", 64, 130), ("all", "float", 32, 64),
        ("rank", "int", 128, 300), ("rank", "float", 64, 192), ("rank", "none", 256, 300), ("other ranks", "int", 32, 64),
    ],
)  # fmt: skip
def test_int4_digits(routed: str, zero: str, group: int, k: int) -> None:
    weight, real = int4(40, k, group, zero)
    check(weight, real, random_routing(*ROUTINGS[routed]), torch.float32, 5e-4)


@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize(("dtype", "group"), [(torch.bfloat16, 16), (torch.float16, 48), (torch.bfloat16, 128)])
def test_int4_dequantized_in_registers(zero: str, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups too small for int8 products, and more rows than digits are used for."""
    monkeypatch.setattr(moe_operands, "digits_are_faster", lambda rows, group, bits: False)
    weight, real = int4(24, 240, group, zero)
    check(weight, real, random_routing(*ROUTINGS["rank"]), dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("routed", ["all", "rank"])
@pytest.mark.parametrize("tile", [QuantTile(16, 64, 3), QuantTile(32, 128, 1)])
def test_int4_tiles(routed: str, tile: QuantTile) -> None:
    weight, real = int4(24, 256, 32, "int")
    check(weight, real, random_routing(*ROUTINGS[routed]), torch.bfloat16, TOLERANCE[torch.bfloat16], tile)


@pytest.mark.parametrize("group", [32, 12])
@pytest.mark.parametrize("routed", ["all", "rank"])
def test_int4_with_an_order_of_features_per_expert(routed: str, group: int) -> None:
    weight, real = int4(24, 96, group, "int", ordered=True)
    check(weight, real, random_routing(*ROUTINGS[routed]), torch.float32, 5e-4)


def test_int4_groups_that_no_tile_supports() -> None:
    weight, real = int4(24, 60, 12, "float")
    assert weight.layout == "stored"
    check(weight, real, random_routing(*ROUTINGS["rank"]), torch.float32, 1e-5)


@pytest.mark.parametrize("routed", ["all", "rank"])
@pytest.mark.parametrize("tile", [QuantTile(32, 64, 3), QuantTile(64, 128, 1), QuantTile(32, 192, 1)])
@pytest.mark.parametrize(("dtype", "group", "k"), [(torch.bfloat16, 32, 290), (torch.float16, 16, 256), (torch.bfloat16, 128, 384)])
def test_fp4_in_quads(routed: str, tile: QuantTile, dtype: torch.dtype, group: int, k: int) -> None:
    """Tiles, iterations and chunks of 64 features that are full or not."""
    weight, real = int4(40, k, group, "e2m1")
    assert weight.layout == "quads"
    check(weight, real, random_routing(*ROUTINGS[routed]), dtype, TOLERANCE[dtype], tile)


GATES: list[Gate] = [*ACTIVATIONS, ClippedGate(0.5, 1.702)]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize(
    ("routed", "tile"), [("one", QuantTile(64, 64, 3)), ("all", QuantTile(32, 128, 1)), ("rank", QuantTile(128, 64, 1))]
)
@pytest.mark.parametrize("group", [16, 32])
def test_fp4_gates(routed: str, tile: QuantTile, gate: Gate, group: int) -> None:
    """Values around the limits of the gate of gpt-oss. Groups of 16 have a factor per row."""
    weight, real = int4(88, 192, group, "e2m1")
    routing, bias, x = random_routing(*ROUTINGS[routed]), torch.randn(EXPERTS, 88).bfloat16(), torch.randn(12, 192).bfloat16()
    x = x[: routing.weights.shape[0]]
    wide = expected_rows(x[routing.order.long() // routing.top_k], real, bias, routing)
    if isinstance(gate, str):
        want = ACTIVATIONS[gate](wide[:, :44]) * wide[:, 44:]
    else:
        left, right = wide[:, :44].clamp(max=0.5), wide[:, 44:].clamp(-0.5, 0.5)
        want = (right + 1) * left / (1 + torch.exp(-1.702 * left))
        assert (wide[:, :44] > 0.5).any() and (wide[:, 44:].abs() > 0.5).any()
    found = moe.expert_up(x, replace(weight, bias=bias), routing, gate, tile=tile)
    assert found.shape == want.shape and relative_error(found, want) < TOLERANCE[torch.bfloat16]
    assert not quant_linear.split_counters(x.device).any()


@pytest.mark.parametrize("tokens", [32, 64])
@pytest.mark.parametrize("rows", [(17, 0, 70, 33, 16), (0, 0, 0, 0, 64), (65, 1, 32, 0, 0)])
def test_whole_halves_and_quarters_of_tiles(rows: tuple[int, ...], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of whole tiles, whether the first tiles of experts are searched or not."""
    weight, _ = int4(40, 128, 32, "e2m1")
    routing = random_routing(list(rows), 0, 0)
    x, choices = torch.randn(len(routing.weights), 128).bfloat16(), torch.randn(len(routing.order), 128).bfloat16()
    results = []
    for is_whole, parts in ((True, moe._PARTS), (False, moe._PARTS), (False, {})):
        monkeypatch.setattr(moe, "_PARTS", parts)
        choice = replace(routing, is_whole=is_whole)
        results.append((moe.expert_up(x, weight, choice, "silu", tokens=tokens), moe.expert_down(choices, weight, choice, tokens=tokens)))
    for up, down in results[1:]:
        assert torch.equal(up, results[0][0]) and torch.equal(down, results[0][1])


@pytest.mark.parametrize("gate", ["silu", ClippedGate(0.5, 1.702)], ids=str)
@pytest.mark.parametrize("kind", ["int4", "int8", "blocks"])
def test_gates_after_other_formats(kind: str, gate: Gate) -> None:
    weight = {
        "int4": lambda: int4(24, 64, 32, "int"),
        "int8": lambda: int8_groups(24, 64, 32, True),
        "blocks": lambda: blocks(24, 64, (16, 32)),
    }[kind]()[0]
    x, routing = torch.randn(12, 64), random_routing(*ROUTINGS["rank"])
    wide = moe.expert_up(x, weight, routing).double()
    want = wide[:, :12] / (1 + torch.exp(-wide[:, :12])) * wide[:, 12:]
    if gate != "silu":
        left, right = wide[:, :12].clamp(max=0.5), wide[:, 12:].clamp(-0.5, 0.5)
        want = (right + 1) * left / (1 + torch.exp(-1.702 * left))
    assert relative_error(moe.expert_up(x, weight, routing, gate), want) < 1e-5


def test_parts_of_experts_become_the_same_quads(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 256, (EXPERTS, 24, 96), dtype=torch.uint8)
    stored = PackedWeight("int4", codes, torch.ones(EXPERTS, 24, 6).bfloat16(), None, 32, is_fp4=True)
    together = quant_int4.prepare_weight(stored)
    for experts_of_a_part in (1, 2):
        monkeypatch.setattr(fp4, "_CONVERTED", experts_of_a_part * 24 * 192)
        assert torch.equal(quant_int4.prepare_weight(stored).values, together.values)


@pytest.mark.parametrize("scale", FP4_SCALES)
def test_every_fp4_value_and_scale_is_exact(scale: str) -> None:
    stored, real = fp4_expert_of_every_scale(scale)
    features = real.shape[2]
    routing = Routing(torch.ones(features, 1), torch.arange(features).int(), torch.tensor([0, features]).int())
    weight = quant_int4.prepare_weight(stored)
    assert weight.layout == "quads"
    assert torch.equal(moe.expert_up(torch.eye(features).bfloat16(), weight, routing).double(), real[0].T)


@pytest.mark.parametrize(("n", "scale", "group"), [(24, 4.0, 32), (24, float("nan"), 32), (25, 1.0, 32), (24, 4.0, 64), (25, 1.0, 128)])
def test_fp4_that_quads_do_not_hold(n: int, scale: float, group: int) -> None:
    """A large scale would overflow in the kernel, and a pair of rows needs two. Digits of activations are not multiplied by FP4."""
    codes = torch.randint(0, 256, (EXPERTS, n, 96), dtype=torch.uint8)
    scales = torch.full((EXPERTS, n, -(-192 // group)), 0.125).bfloat16()
    scales[1, 3, 0] = scale
    stored = PackedWeight("int4", codes, scales, None, group, is_fp4=True)
    weight = quant_int4.prepare_weight(stored)
    assert weight.layout == "paired"
    routing = random_routing(*ROUTINGS["rank"])
    if scale == scale:
        check(weight, dequantize_int4(stored, torch.float64), routing, torch.bfloat16, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("routed", "group", "k"), [("one", 32, 192), ("rank", 64, 130), ("all", 16, 60), ("rank", 256, 300)])
def test_int8_groups(routed: str, group: int, k: int, shifted: bool) -> None:
    weight, real = int8_groups(24, k, group, shifted)
    check(weight, real, random_routing(*ROUTINGS[routed]), torch.float32, 5e-4)


@pytest.mark.parametrize("shifted", [False, True])
def test_int8_groups_dequantized_in_registers(shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_operands, "digits_are_faster", lambda rows, group, bits: False)
    weight, real = int8_groups(24, 192, 32, shifted)
    check(weight, real, random_routing(*ROUTINGS["rank"]), torch.bfloat16, TOLERANCE[torch.bfloat16])
    check(weight, real, random_routing(*ROUTINGS["all"]), torch.bfloat16, TOLERANCE[torch.bfloat16], QuantTile(16, 64, 3))


@pytest.mark.parametrize("routed", ROUTINGS)
@pytest.mark.parametrize("block", [(16, 32), (128, 64), (3, 5)])
def test_blocks(routed: str, block: tuple[int, int]) -> None:
    """No tile supports the last block."""
    weight, real = blocks(40, 150, block)
    check(weight, real, random_routing(*ROUTINGS[routed]), torch.float32, 1e-5, rounded=lambda x: round_groups(x.float(), block[1]))


def test_block_tiles() -> None:
    weight, real = blocks(40, 192, (128, 64))
    routing = random_routing(*ROUTINGS["rank"])
    check(weight, real, routing, torch.bfloat16, 1e-2, QuantTile(16, 64, 3), lambda x: round_groups(x.float(), 64))


def test_a_packed_expert_equals_the_packed_linear() -> None:
    codes = torch.randint(0, 256, (3, 24, 50), dtype=torch.uint8)
    stored = PackedWeight("int4", codes, torch.rand(3, 24, 4), torch.randint(0, 16, (3, 24, 4), dtype=torch.uint8), 32)
    stacked = quant_int4.prepare_weight(stored)
    for e in range(3):
        alone, expert = quant_int4.prepare_weight(stored.expert(e)), stacked.expert(e)
        assert alone.layout == expert.layout == "paired" and alone.group_size == expert.group_size
        assert all(torch.equal(getattr(alone, name), getattr(expert, name)) for name in ("values", "scale", "zero"))


def stored_int4(ordered: bool) -> PackedWeight:
    scale = torch.rand(EXPERTS, 24, 2) + 0.5
    codes = torch.randint(0, 256, (EXPERTS, 24, 32), dtype=torch.uint8)
    order = torch.stack([torch.randperm(64) for _ in range(EXPERTS)]).int() if ordered else None
    return PackedWeight("int4", codes, scale, -torch.rand(scale.shape), 32, column_order=order)


@pytest.mark.parametrize("kind", ["int4", "int4 in an order", "int8", "blocks"])
def test_equal_to_the_reference(kind: str) -> None:
    routing, bias, x = random_routing(*ROUTINGS["rank"]), torch.randn(EXPERTS, 24), torch.randn(12, 64)
    stored = (
        stored_int4("order" in kind)
        if "int4" in kind
        else (int8_groups(24, 64, 32, True) if kind == "int8" else blocks(24, 64, (16, 32)))[0]
    )
    stored = replace(stored, bias=bias)
    prepared = quant_int4.prepare_weight(stored) if stored.format == "int4" else stored
    want = reference.expert_up(x, stored, routing)
    assert relative_error(moe.expert_up(x, prepared, routing), want) < 5e-4
    sorted_rows = torch.randn(24, 64)
    want = reference.expert_down(sorted_rows, stored, routing)
    assert relative_error(moe.expert_down(sorted_rows, prepared, routing), want) < 5e-4


def test_no_rows() -> None:
    empty = Routing(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32), torch.zeros(EXPERTS + 1, dtype=torch.int32))
    for weight, _ in (int4(24, 64, 32, "int", ordered=True), blocks(24, 64, (128, 64))):
        assert moe.expert_up(torch.zeros(0, 64), weight, empty).shape == (0, 24)
        assert moe.expert_down(torch.zeros(0, 64), weight, empty).shape == (0, 24)
