"""Greedy sampling by the C kernel equals PyTorch's reference."""

from __future__ import annotations

import pytest
import torch

from stoker.kernels.native import library, sampling
from stoker.kernels.reference import sampling as reference
from stoker.kernels.types import DrawParams

pytestmark = pytest.mark.skipif(isinstance(library.kernels(), str), reason="no C kernels")

NAN, INF = float("nan"), float("inf")


def params(rows: int, all_greedy: bool = True) -> DrawParams:
    ones, zeros = torch.ones(rows), torch.zeros(rows, dtype=torch.int32)
    return DrawParams(ones * 0.7, zeros, ones, ones * 0, zeros.long() + 5, zeros, all_greedy)


@pytest.fixture(autouse=True)
def only_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference that `sampling.sample` calls fails."""
    monkeypatch.setattr(sampling, "reference", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 1000, 49152])
def test_the_largest_logit(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, size).to(dtype)  # in bfloat16 some are equal: the first one counts
    logits[4] = 0.5
    wide = torch.cat([logits, logits + 9], dim=1)[:, :size]  # a larger stride than the number of columns
    expected = reference.sample(logits, params(5))
    assert torch.equal(sampling.sample(logits, params(5)), expected) and torch.equal(sampling.sample(wide, params(5)), expected)
    assert expected.dtype == torch.int32 and expected[4] == 0


@pytest.mark.parametrize("size", [3, 40, 200])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_logits_that_are_not_finite(value: float, size: int) -> None:
    for at in range(size):
        logits = torch.randn(2, size)
        logits[1, at] = value
        found = sampling.sample(logits, params(2))
        assert torch.equal(found, reference.sample(logits, params(2)))
        assert (found[1] == -1) == (value != -INF) and found[0] >= 0
    assert (sampling.sample(torch.full((2, size), -INF), params(2)) == -1).all()
    assert (sampling.sample(torch.full((2, size), NAN), params(2)) == -1).all()


def test_equal_logits_of_different_lanes_yield_the_first() -> None:
    for first in range(0, 300, 7):
        for second in range(first + 1, 300, 11):
            logits = torch.zeros(1, 300)
            logits[0, first] = logits[0, second] = 2.0
            assert sampling.sample(logits, params(1)).tolist() == [first]


def test_other_arguments_run_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "reference", reference)
    logits = torch.randn(3, 50)
    for other, drawn in ((logits.half(), params(3)), (logits, params(3, False)), (torch.randn(3, 100)[:, ::2], params(3))):
        assert torch.equal(sampling.sample(other, drawn), reference.sample(other, drawn))
