"""Quantized experts on a GPU: captured once and replayed for other inputs and another routing, as in a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import FP4_SCALES, fp4_expert_of_every_scale, relative_error

from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.types import ClippedGate, Gate
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
from stoker.quant.formats.fp4 import Fp4
from stoker.quant.formats.fp8 import Fp8
from stoker.quant.formats.int4 import Int4
from stoker.quant.formats.int8 import Int8
from stoker.quant.formats.int8_grouped import GroupedInt8

EXPERTS, OUT, IN = 8, 256, 512
FORMATS: dict[str, Format] = {
    "int8": Int8(),
    "fp8": Fp8(),
    "int4, symmetric": Int4(group_size=128, zero="none", clip=False),
    "int4, zero points": Int4(group_size=64, zero="int", clip=False),
    "int4, offsets": Int4(group_size=32, zero="float", clip=False),
    "int4, small groups": Int4(group_size=16, zero="float", clip=False),
    "int4, with a column order": Int4(group_size=128, zero="int", clip=False, reorder=True),
    "MXFP4": Fp4(),
    "NVFP4": Fp4(group_size=16, scale="e4m3"),
    "int8 in groups": GroupedInt8(group_size=32, shifted=True),
    "int8 in small groups": GroupedInt8(group_size=16),
    "blocks": BlockFp8(),
    "blocks of another size than any tile": BlockFp8(rows=64, columns=24),
}


def step(
    weight_format: Format, stored: dict[str, torch.Tensor], device: str, x: torch.Tensor, inner: torch.Tensor, logits: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that runs the up and the down projection over these inputs, on `device`."""
    experts = weight_format.load({suffix: t.to(device) for suffix, t in stored.items()}, None)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        routing = ops.route(logits, None, RoutingParams(2))
        return experts.up(x, routing), experts.down(inner, routing)

    return run


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, IN).bfloat16(), torch.randn(2 * rows, IN).bfloat16(), torch.randn(rows, EXPERTS)]


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("scale", FP4_SCALES)
def test_every_fp4_value_and_scale_is_exact(scale: str, tokens: int) -> None:
    """Of results that are normal numbers. Tiles of 8 tokens have other matrix instructions."""
    from stoker.kernels.triton.moe import launch as moe  # after tests/kernels has set TRITON_INTERPRET

    stored, real = fp4_expert_of_every_scale(scale)
    tensors = {name: value.cuda() for name in ("values", "scale", "row_scale") if (value := getattr(stored, name)) is not None}
    weight = ops.prepare_weight(replace(stored, **tensors))
    assert weight.layout == "quads"
    features = real.shape[2]
    routing = Routing(*(t.cuda() for t in (torch.ones(features, 1), torch.arange(features).int(), torch.tensor([0, features]).int())))
    found = moe.expert_up(torch.eye(features).bfloat16().cuda(), weight, routing, tokens=tokens).double().cpu()
    is_normal = real[0].T.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(torch.where(is_normal, found, 0), torch.where(is_normal, real[0].T, 0))


@pytest.mark.parametrize("rows", [1, 7, 48, 600, 1200])
@pytest.mark.parametrize("name", FORMATS)
def test_a_graph_is_replayed_for_another_routing(name: str, rows: int) -> None:
    torch.manual_seed(rows)
    weight_format = FORMATS[name]
    spec = LinearSpec(name="experts", in_features=IN, parts=(OUT,), num_experts=EXPERTS)
    stored = weight_format.quantize(torch.randn(EXPERTS, OUT, IN) / IN**0.5, spec)
    if getattr(weight_format, "reorder", False):
        stored["order"] = torch.stack([torch.randperm(IN) for _ in range(EXPERTS)]).int()
    captured = [t.to("cuda") for t in inputs(rows)]
    run = step(weight_format, stored, "cuda", *captured)
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        up, down = run()
    for _ in range(2):
        fresh = inputs(rows)
        for tensor, value in zip(captured, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        expected = step(weight_format, stored, "cpu", *(t.float() for t in fresh))()
        for result, reference in zip((up, down), expected, strict=True):
            assert relative_error(result.cpu(), reference) < 1.5e-2


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", ClippedGate(0.5, 1.702)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 48, 200, 600, 1200])
def test_gates_of_fp4(rows: int, gate: Gate) -> None:
    """In tiles of 8 to 128 tokens, whole ones, halves and quarters, because experts have different numbers of rows. Expert 3 has none."""
    torch.manual_seed(rows)
    spec = LinearSpec(name="experts", in_features=IN, parts=(OUT // 2, OUT // 2), num_experts=EXPERTS)
    stored = Fp4().quantize(torch.randn(EXPERTS, OUT, IN) / IN**0.5, spec)
    x, logits = torch.randn(rows, IN).bfloat16(), torch.randn(rows, EXPERTS) + torch.arange(EXPERTS) / 3
    logits[:, 3] = -100.0
    results = []
    for device, tokens in (("cuda", x.cuda()), ("cpu", x.float())):
        experts = Fp4().load({suffix: t.to(device) for suffix, t in stored.items()}, None)
        results.append(experts.up(tokens, ops.route(logits.to(device), None, RoutingParams(2)), gate).cpu())
    assert results[0].shape == (2 * rows, OUT // 2) and relative_error(*results) < 1.5e-2


@pytest.mark.parametrize("rows", [5, 700, 1300])
def test_bfloat16(rows: int) -> None:
    """5 and 700 rows run in our kernels, 1,300 in the library's grouped GEMM. No token chooses expert 3."""
    x, weight = torch.randn(rows, IN).bfloat16(), (torch.randn(EXPERTS, OUT, IN) / IN**0.5).bfloat16()
    logits = torch.randn(rows, EXPERTS)
    logits[:, 3] = -100.0

    def up_and_down(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = ops.route(logits, None, RoutingParams(2))
        up = ops.expert_up(x, PackedWeight("dense", weight), routing)
        return up, ops.expert_down(up, PackedWeight("dense", weight.transpose(1, 2).contiguous()), routing)

    results = up_and_down(x.cuda(), weight.cuda(), logits.cuda())
    for result, reference in zip(results, up_and_down(x.float(), weight.float(), logits), strict=True):
        assert relative_error(result.cpu(), reference) < 1.5e-2
