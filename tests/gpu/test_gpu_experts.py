"""Quantized experts on a GPU, captured once and replayed for other rows and another routing: what a decode step does with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import relative_error

from stoker.core.packed_weight import PackedWeight
from stoker.core.specs import LinearSpec
from stoker.kernels import ops
from stoker.kernels.routing import RoutingParams
from stoker.quant.format import Format
from stoker.quant.formats.block_fp8 import BlockFp8
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
    "int4, in an order": Int4(group_size=128, zero="int", clip=False, reorder=True),
    "int8 in groups": GroupedInt8(group_size=32, shifted=True),
    "int8 in small groups": GroupedInt8(group_size=16),
    "blocks": BlockFp8(),
    "blocks that no tile has": BlockFp8(rows=64, columns=24),
}


def step(
    chosen: Format, stored: dict[str, torch.Tensor], device: str, x: torch.Tensor, inner: torch.Tensor, logits: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """What runs the projections up and down over the given rows, on `device`."""
    experts = chosen.load({suffix: t.to(device) for suffix, t in stored.items()}, None)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        routing = ops.route(logits, None, RoutingParams(2))
        return experts.up(x, routing), experts.down(inner, routing)

    return run


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, IN).bfloat16(), torch.randn(2 * rows, IN).bfloat16(), torch.randn(rows, EXPERTS)]


@pytest.mark.parametrize("rows", [1, 7, 48, 600, 1200])
@pytest.mark.parametrize("name", FORMATS)
def test_replayed_for_another_routing(name: str, rows: int) -> None:
    torch.manual_seed(rows)
    chosen = FORMATS[name]
    spec = LinearSpec(name="experts", in_features=IN, parts=(OUT,), num_experts=EXPERTS)
    stored = chosen.quantize(torch.randn(EXPERTS, OUT, IN) / IN**0.5, spec)
    if getattr(chosen, "reorder", False):
        stored["order"] = torch.stack([torch.randperm(IN) for _ in range(EXPERTS)]).int()
    given = [t.to("cuda") for t in inputs(rows)]
    run = step(chosen, stored, "cuda", *given)
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        up, down = run()
    for _ in range(2):
        fresh = inputs(rows)
        for tensor, value in zip(given, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        wanted = step(chosen, stored, "cpu", *(t.float() for t in fresh))()
        for got, want in zip((up, down), wanted, strict=True):
            assert relative_error(got.cpu(), want) < 1.5e-2


@pytest.mark.parametrize("rows", [5, 700, 1300])
def test_bfloat16(rows: int) -> None:
    """1,300 rows go through the library, in any order of the choices, with experts that nobody chose."""
    x, weight = torch.randn(rows, IN).bfloat16(), (torch.randn(EXPERTS, OUT, IN) / IN**0.5).bfloat16()
    logits = torch.randn(rows, EXPERTS)
    logits[:, 3] = -100.0

    def both(given: torch.Tensor, stacked: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = ops.route(scores, None, RoutingParams(2))
        up = ops.expert_up(given, PackedWeight("dense", stacked), routing)
        return up, ops.expert_down(up, PackedWeight("dense", stacked.transpose(1, 2).contiguous()), routing)

    found, wanted = both(x.cuda(), weight.cuda(), logits.cuda()), both(x.float(), weight.float(), logits)
    for got, want in zip(found, wanted, strict=True):
        assert relative_error(got.cpu(), want) < 1.5e-2
