"""The choice of experts on a GPU: captured once and replayed for other tokens, as in a decode step."""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error

from stoker.kernels import ops
from stoker.kernels.routing import RoutingParams
from stoker.kernels.types import Fusion

# (experts, number of features, parameters): gpt-oss-20b, Qwen3-30B-A3B, Mixtral, DeepSeek-V3 with fewer features, Phi-3.5-MoE.
ROUTERS = {
    "gpt-oss": (32, 2880, RoutingParams(4, "softmax_topk")),
    "qwen3": (128, 2048, RoutingParams(8)),
    "mixtral": (8, 4096, RoutingParams(2)),
    "deepseek": (256, 1024, RoutingParams(8, "sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2")),
    "sparsemixer": (16, 4096, RoutingParams(2, "sparsemixer", renormalize=False)),
}


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 17, 64, 65, 300, 448, 1024])
@pytest.mark.parametrize("name", ROUTERS)
def test_choices_equal_those_of_a_float64_router(name: str, tokens: int) -> None:
    """A token is compared whole, unless two of its logits are so near each other that float32 sums may exchange them."""
    torch.manual_seed(tokens)
    experts, features, params = ROUTERS[name]
    weight, bias = torch.randn(experts, features) / features**0.5, torch.randn(experts) / 4
    correction = torch.rand(experts) / 8 if params.score == "sigmoid" else None
    device = [None if t is None else t.cuda() for t in (weight, bias, correction)]
    fusion = Fusion("rms", (torch.rand(features) + 0.5).bfloat16().cuda(), None, 1e-5)
    x = torch.empty(tokens, features, dtype=torch.bfloat16, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        y, routing = ops.route_tokens(x, device[0], device[1], device[2], params, fusion)  # type: ignore[arg-type]
        return y, routing.weights, routing.order, routing.offsets

    x.normal_()
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        x.normal_()
        graph.replay()
        y, weights, order, offsets = (t.cpu() for t in found)
        wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * fusion.norm_weight
        assert relative_error(y, wide.cpu()) < 5e-3
        assert sorted(order.tolist()) == list(range(tokens * params.top_k))
        assert offsets[0] == 0 and offsets[-1] == tokens * params.top_k and bool((offsets.diff() >= 0).all())
        chosen = chosen_experts(order, offsets)
        assert all(bool((part.diff() > 0).all()) for part in order.split(offsets.diff().tolist()))  # an expert's choices are in order
        wanted = ops.route(y.double() @ weight.double().T + bias, correction, params)
        expected = chosen_experts(wanted.order, wanted.offsets)
        same = (chosen.view(tokens, -1) == expected.view(tokens, -1)).all(1)
        assert same.float().mean() > 0.98 or int((~same).sum()) <= 1
        assert torch.allclose(weights[same], wanted.weights.float()[same], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3", "mixtral", "sparsemixer"])
def test_a_token_of_many_is_routed_equally_in_every_batch(name: str) -> None:
    """With the same bits, in 20 repetitions of a graph and with other tokens around it. One token has a NaN."""
    torch.manual_seed(0)
    experts, features, params = ROUTERS[name]
    x, weight = torch.randn(1024, features).bfloat16().cuda(), torch.randn(experts, features).cuda() / features**0.5
    x[100, 3], x[130:190] = float("nan"), x[130].clone()
    fusion = Fusion("rms", torch.ones(features).bfloat16().cuda(), None, 1e-5)
    whole_y, whole = ops.route_tokens(x, weight, None, None, params, fusion)
    whole_chosen = chosen_experts(whole.order.cpu(), whole.offsets.cpu()).view(1024, -1)
    assert whole.weights[100].isnan().all() and not whole.weights[101:].isnan().any()
    for start, stop in ((0, 65), (99, 227), (37, 485), (0, 768), (960, 1024 + 1)):
        part = x[start:stop].contiguous()
        if len(part) < 65:
            part = torch.cat([part, x[:65]])
        graph = torch.cuda.CUDAGraph()
        ops.route_tokens(part, weight, None, None, params, fusion)  # compiles
        with torch.cuda.graph(graph):
            y, routing = ops.route_tokens(part, weight, None, None, params, fusion)
        count = len(x[start:stop])
        for _ in range(20):
            graph.replay()
            assert torch.equal(y[:count].view(torch.int16), whole_y[start:stop].view(torch.int16))
            assert torch.equal(routing.weights[:count].view(torch.int32), whole.weights[start:stop].view(torch.int32))
            chosen = chosen_experts(routing.order.cpu(), routing.offsets.cpu()).view(len(part), -1)
            assert torch.equal(chosen[:count], whole_chosen[start:stop])


def chosen_experts(order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The expert of each choice."""
    experts = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff().long())
    return torch.empty_like(experts).index_copy_(0, order.long(), experts)
