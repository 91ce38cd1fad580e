"""Routing and expert projections, compared with loops over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.routing import Routing, RoutingParams

EXPERTS, HIDDEN, WIDE = 8, 12, 10


def naive(logits: torch.Tensor, correction: torch.Tensor | None, params: RoutingParams) -> list[dict[int, float]]:
    """The weight of each chosen expert of each token, computed token by token with Python floats."""
    weights_by_token = []
    for row in logits.double():
        if params.score == "softmax_topk":
            chosen = sorted(range(EXPERTS), key=lambda e: -row[e].item())[: params.top_k]
            weights = row[chosen].softmax(0)
            weights_by_token.append({e: params.scale * w.item() for e, w in zip(chosen, weights, strict=True)})
            continue
        scores = row.sigmoid() if params.score == "sigmoid" else row.softmax(0)
        wanted = scores if correction is None else scores + correction.double()
        size = EXPERTS // params.num_groups
        groups = [sorted((wanted[e].item() for e in range(g * size, (g + 1) * size)), reverse=True) for g in range(params.num_groups)]
        rank = [sum(group[:2]) if params.group_score == "top2" else group[0] for group in groups]
        open_groups = sorted(range(params.num_groups), key=lambda g: -rank[g])[: params.top_groups]
        allowed = [e for e in range(EXPERTS) if e // size in open_groups]
        chosen = sorted(allowed, key=lambda e: -wanted[e].item())[: params.top_k]
        total = sum(scores[e].item() for e in chosen) if params.renormalize else 1.0
        weights_by_token.append({e: params.scale * scores[e].item() / total for e in chosen})
    return weights_by_token


def by_token(routing: Routing, num_tokens: int) -> list[dict[int, float]]:
    found: list[dict[int, float]] = [{} for _ in range(num_tokens)]
    for expert in range(EXPERTS):
        for choice in routing.order[routing.offsets[expert] : routing.offsets[expert + 1]].tolist():
            token, number = divmod(choice, routing.top_k)
            found[token][expert] = routing.weights[token, number].item()
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(0, 9),
    top_k=st.integers(1, 4),
    score=st.sampled_from(["softmax", "sigmoid", "softmax_topk"]),
    renormalize=st.booleans(),
    groups=st.sampled_from([(1, 1, "max"), (4, 2, "max"), (4, 2, "top2"), (2, 1, "top2")]),
    corrected=st.booleans(),
)
def test_routing_equals_the_definition(
    seed: int, num_tokens: int, top_k: int, score: str, renormalize: bool, groups: tuple[int, int, str], corrected: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, EXPERTS, generator=generator) * 2
    correction = torch.randn(EXPERTS, generator=generator) if corrected and score != "softmax_topk" else None
    if score == "softmax_topk":
        groups = (1, 1, "max")
    params = RoutingParams(top_k, score, renormalize, 1.5, *groups)
    found = by_token(ops.route(logits, correction, params), num_tokens)
    expected = naive(logits, correction, params)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_projections_sum_the_chosen_experts(num_tokens: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    up, down = torch.randn(EXPERTS, WIDE, HIDDEN, generator=generator), torch.randn(EXPERTS, HIDDEN, WIDE, generator=generator)
    up_bias = torch.randn(EXPERTS, WIDE, generator=generator) if biased else None
    down_bias = torch.randn(EXPERTS, HIDDEN, generator=generator) if biased else None
    routing = ops.route(torch.randn(num_tokens, EXPERTS, generator=generator), None, RoutingParams(3))
    inner = ops.expert_up(x, PackedWeight("dense", up, bias=up_bias), routing).relu()
    found = ops.expert_down(inner, PackedWeight("dense", down, bias=down_bias), routing)
    expected = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for token, weights in enumerate(by_token(routing, num_tokens)):
        for e, weight in weights.items():
            wide = up[e].double() @ x[token].double() + (0 if up_bias is None else up_bias[e])
            expected[token] += weight * (down[e].double() @ wide.relu() + (0 if down_bias is None else down_bias[e]))
    assert torch.allclose(found.double(), expected, atol=1e-4)
