"""The GEMM for many rows over the weights of experts, on the device, against float64.

Triton is imported inside functions: tests/kernels, collected after this folder, sets TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracle import relative_error

from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.reference import linear as linear_reference
from stoker.kernels.routing import RoutingParams
from stoker.kernels.types import Fusion

COUNTS = {
    "ragged": [0, 1, 300, 0, 64, 128, 40, 257],
    "one expert": [0, 0, 777, 0, 0, 0, 0, 0],
    "one row each": [1] * 8,
    "even": [192] * 8,
    "near the tiles": [127, 128, 129, 191, 192, 193, 255, 256],
    "many experts": [random.randrange(0, 40) for _ in range(130)],
}


@pytest.fixture(autouse=True)
def hopper() -> None:
    from stoker.kernels.triton.device import supports

    if not supports(torch.empty(1, device="cuda"), "large_gemm"):
        pytest.skip("the kernel needs sm_90")


def quantized(*shape: int) -> Any:
    """Normally distributed rows, quantized to FP8 with a scale per row."""
    from stoker.kernels.triton.gemm.quantized.activations import quantize_rows

    return quantize_rows(torch.randn(shape, device="cuda", dtype=torch.bfloat16), "fp8", shape[-1])


def operand(rows: int, k: int, is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values [rows, k], the scale of each row, or None without FP8)"""
    if is_fp8:
        x = quantized(rows, k)
        return x.values, x.scale
    return torch.randn(rows, k, device="cuda", dtype=torch.bfloat16), None


def widened(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The rows in float64."""
    return values.double() if scale is None else values.double() * scale.double()[:, None]


@pytest.mark.parametrize("parts", ["", "bg"])
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bfloat16"])
@pytest.mark.parametrize("name", COUNTS)
def test_ragged_experts(name: str, is_fp8: bool, parts: str) -> None:
    """Every row against float64. A row has the bits of a product with the weight of its expert alone."""
    from stoker.kernels.triton.gemm.large.launch import large_gemm
    from stoker.kernels.triton.gemm.large.tiles import NARROW_TILE, TALL_TILE, TILE

    counts = COUNTS[name]
    experts, gate = len(counts), "silu" if "g" in parts else None
    n, k = 16 * random.randrange(1, 100), 16 * random.randrange(9, 200)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    bounds, width = list(pairwise(offsets.tolist())), 2 * n if gate else n
    x, x_scale = operand(sum(counts), k, is_fp8)
    values, scale = (None if part is None else part.unflatten(0, (experts, width)) for part in operand(experts * width, k, is_fp8))
    assert values is not None
    bias = torch.randn(experts, width, device="cuda", dtype=torch.bfloat16) if "b" in parts else None
    tiles = [TILE, NARROW_TILE, *([] if gate else [TALL_TILE])] if experts == 8 else [TILE]  # each number of experts has kernels of its own
    for tile in tiles:
        torch.full((sum(counts), n), torch.nan, device="cuda", dtype=torch.bfloat16)  # freed, and then the memory of the output
        arguments = {"bias": bias, "gate": gate, "offsets": offsets.cuda()}
        out = large_gemm(x, values, tile, x_scale=x_scale, weight_scale=scale, **arguments)
        for _ in range(3):
            again = large_gemm(x, values, tile, x_scale=x_scale, weight_scale=scale, **arguments)
            assert torch.equal(again, out), (tile, n, k)
        for expert, (begin, end) in enumerate(bounds):
            if begin == end:
                continue
            rows = widened(x[begin:end], None if x_scale is None else x_scale[begin:end])
            added = None if bias is None else bias[expert].double()
            weight = widened(values[expert], None if scale is None else scale[expert])
            want = linear_reference.linear(rows, weight, added, Fusion(gate=gate))
            assert relative_error(out[begin:end], want) < 1e-2, (tile, expert, n, k)
        last = max(expert for expert, count in enumerate(counts) if count)
        begin, end = bounds[last]
        added = None if bias is None else bias[last].clone()
        scales = {}
        if x_scale is not None and scale is not None:
            scales = {"x_scale": x_scale[begin:end].clone(), "weight_scale": scale[last].clone()}
        alone = large_gemm(x[begin:end].clone(), values[last].clone(), tile, **scales, bias=added, gate=gate)
        assert torch.equal(out[begin:end], alone), (tile, n, k)


@pytest.mark.parametrize("skew", [0.0, 3.0])
@pytest.mark.parametrize("tokens", [520, 768, 3000])
def test_a_captured_step_with_another_routing(tokens: int, skew: float) -> None:
    """Both projections in a replayed graph have the bits of eager launches, and are close to those of `moe.kernel`."""
    from stoker.kernels.triton.moe import grouped_gemm
    from stoker.kernels.triton.moe import launch as moe
    from stoker.kernels.tuning.tiles import QuantTile

    experts, hidden, size, tile = 8, 2048, 2048, QuantTile(128, 128, 1, 8, 4)
    packed = []
    for n, k in ((2 * size, hidden), (hidden, size)):
        weight = quantized(experts * n, k)
        packed.append(
            PackedWeight("fp8", weight.values.unflatten(0, (experts, n)), weight.scale.unflatten(0, (experts, n)), activations="token")
        )
    up_weight, down_weight = packed
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    logits, shift = torch.randn(tokens, experts, device="cuda"), torch.linspace(0, skew, experts, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        routing = ops.route(logits + shift, None, RoutingParams(2))
        up = ops.expert_up(x, up_weight, routing)
        return up, ops.expert_down(up, down_weight, routing, x, "silu")

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert all(torch.equal(captured, eager) for captured, eager in zip(outputs, run(), strict=True))
        routing = ops.route(logits + shift, None, RoutingParams(2))
        assert grouped_gemm.is_supported(x, up_weight, routing)
        assert relative_error(outputs[0], moe.expert_up(x, up_weight, routing, tile=tile)) < 5e-3
        tiled = moe.expert_down(outputs[0], down_weight, routing, x, "silu", tile=tile)
        assert relative_error(outputs[1], tiled) < 5e-3
