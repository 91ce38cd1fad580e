"""Choosing tokens: the Triton kernels in the interpreter and the reference, both against the definition in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from stoker.kernels.reference import sampling as reference
from stoker.kernels.triton import sampling as kernels
from stoker.kernels.types import DrawParams

EACH = pytest.mark.parametrize("chooser", [reference, kernels], ids=["reference", "triton"])
VOCABS = (1, 5, 4096, 9001)  # the kernels read chunks of 8192 and blocks of 4096


def params(rows: int, **values: float) -> DrawParams:
    """The same for every row; seeds and counters differ."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    return DrawParams(
        **{name: torch.full((rows,), given[name], dtype=dtype) for name, dtype in dtypes.items()},
        seeds=torch.arange(rows) * 7919 - 3, counters=torch.arange(rows, dtype=torch.int32) + 11, all_greedy=False,
    )  # fmt: skip


def kept(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities in float64 of the tokens that the filters keep, one after the other; ties at an edge are all kept."""
    probs = torch.softmax(row.double() / temperature, 0)
    best = probs.max()
    if 0 < top_k < len(row):
        probs = torch.where(probs >= probs.sort(descending=True).values[top_k - 1], probs, 0)
    if top_p < 1:
        order = probs.sort(descending=True)
        before = order.values.cumsum(0) - order.values
        last = order.values[before < top_p * probs.sum()][-1]
        probs = torch.where(probs >= last, probs, 0)
    return torch.where(probs >= min_p * best, probs, 0)


FILTERS = [
    {}, {"temperature": 0.3}, {"temperature": 2.0}, {"top_k": 1}, {"top_k": 3}, {"top_k": 1 << 30}, {"top_p": 0.5}, {"top_p": 1e-6},
    {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    {"top_k": 2000, "top_p": 0.3, "temperature": 2.0}, {"top_p": 1e-60}, {"temperature": 1e-60}, {"temperature": 100.0},
]  # fmt: skip


@EACH
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_inverts_the_distribution_of_what_is_kept(chooser: ModuleType, vocab: int, filters: dict) -> None:
    logits = torch.randn(2, vocab) * 3
    asked = params(2, **filters)
    drawn = chooser.sample(logits, asked)
    assert drawn.dtype == torch.int32
    uniform = reference.uniform(asked.seeds, asked.counters).double()
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    for row in range(2):
        probs = kept(logits[row], **full)
        token = int(drawn[row])
        assert probs[token] > 0, "a dropped token was drawn"
        upper = probs.cumsum(0) / probs.sum()
        assert upper[token] - probs[token] / probs.sum() - 2e-6 <= uniform[row] <= upper[token] + 2e-6


@EACH
def test_a_greedy_row_beside_drawn_ones_and_alone(chooser: ModuleType) -> None:
    logits = torch.randn(3, 9001)
    asked = params(3)
    asked.temperature[1] = 0.0
    assert chooser.sample(logits, asked)[1] == logits[1].argmax()
    asked.all_greedy = True
    assert torch.equal(chooser.sample(logits, asked), logits.argmax(1).int())


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits(chooser: ModuleType, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5000).to(dtype)
    asked = params(3, top_k=4)
    drawn = chooser.sample(logits, asked)
    for row in range(3):
        assert logits[row, drawn[row]] >= logits[row].float().sort(descending=True).values[3]
    asked.all_greedy = True
    chosen = chooser.sample(logits, asked).long()
    assert torch.equal(logits.gather(1, chosen[:, None])[:, 0], logits.max(1).values)


@EACH
def test_ties_at_an_edge_are_all_kept(chooser: ModuleType) -> None:
    logits = torch.full((16, 5000), -4.0)
    logits[:, [7, 4095, 4096, 4999]] = 6.0
    for filters in ({"top_k": 2}, {"top_p": 0.3}):
        drawn = chooser.sample(logits, params(16, **filters))
        assert set(drawn.tolist()) == {7, 4095, 4096, 4999}


@EACH
def test_the_first_of_equal_bests_is_greedy_on_both(chooser: ModuleType) -> None:
    logits = torch.zeros(2, 9001)
    logits[0, [8191, 8192]] = 1.0
    asked = params(2, temperature=0.0)
    assert chooser.sample(logits, asked).tolist() == [8191, 0]


@EACH
@pytest.mark.parametrize("all_greedy", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_largest_number_is_told_and_alone(chooser: ModuleType, value: float, all_greedy: bool) -> None:
    logits = torch.randn(4, 9001)
    expected = chooser.sample(logits, params(4, top_p=0.9))
    asked = params(4, top_p=0.9)
    asked.all_greedy = all_greedy
    logits[1, 8500] = value if value != float("-inf") else 0.0
    logits[2] = value
    found = chooser.sample(logits, asked)
    assert found[2] == -1
    assert (found[1] == -1) == (value != float("-inf"))
    others = [0, 3]
    assert torch.equal(found[others], logits.argmax(1).int()[others] if all_greedy else expected[others])


@EACH
def test_banned_tokens_are_never_drawn(chooser: ModuleType) -> None:
    logits = torch.full((16, 5000), float("-inf"))
    logits[:, 4500] = -80.0
    logits[:, 3] = -80.0
    drawn = chooser.sample(logits, params(16, temperature=1.7))
    assert set(drawn.tolist()) == {3, 4500}


@EACH
def test_a_padded_table_and_no_rows(chooser: ModuleType) -> None:
    wide = torch.randn(3, 6000)
    assert torch.equal(chooser.sample(wide[:, :4500], params(3)), chooser.sample(wide[:, :4500].contiguous(), params(3)))
    assert chooser.sample(torch.empty(0, 100), params(0)).shape == (0,)


def test_both_draw_the_same_numbers() -> None:
    logits = torch.randn(20, 4097) * 2
    asked = params(20, temperature=0.8)
    asked.top_k[::3], asked.top_p[::2], asked.min_p[::5] = 40, 0.9, 0.02
    same = reference.sample(logits, asked) == kernels.sample(logits, asked)
    assert same.sum() >= 19, "more than rounding at the edge of a token"


@EACH
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities(chooser: ModuleType, num_top: int) -> None:
    logits = torch.randn(5, 4097).bfloat16()
    token_ids = torch.tensor([0, 4096, 17, 17, 4000], dtype=torch.int32)
    chosen, best, ids = chooser.logprobs(logits, token_ids, num_top)
    expected = torch.log_softmax(logits.double(), 1)
    assert torch.allclose(chosen.double(), expected.gather(1, token_ids.long()[:, None])[:, 0], atol=1e-5)
    assert best.shape == ids.shape == (5, num_top) and ids.dtype == torch.int32
    assert torch.allclose(best.double(), expected.sort(descending=True).values[:, :num_top], atol=1e-5)
    assert torch.allclose(expected.gather(1, ids.long()), best.double(), atol=1e-5)
