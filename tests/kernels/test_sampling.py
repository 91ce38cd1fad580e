"""Sampling by the Triton kernels in the interpreter, by the kernels in C, and by the reference, all against the definition in float64."""

from __future__ import annotations

import dataclasses
import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

from stoker.kernels.native import sampling as native
from stoker.kernels.reference import sampling as reference
from stoker.kernels.triton import sampling as kernels
from stoker.kernels.types import DrawParams

EACH = pytest.mark.parametrize("module", [reference, native, kernels], ids=["reference", "native", "triton"])
VOCABS = (1, 5, 4096, 9001)  # the kernels read chunks of 8192 and blocks of 4096


def params(rows: int, **values: float) -> DrawParams:
    """The same options for every row, with different seeds and counters."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    return DrawParams(
        **{name: torch.full((rows,), options[name], dtype=dtype) for name, dtype in dtypes.items()},
        seeds=torch.arange(rows) * 7919 - 3, counters=torch.arange(rows, dtype=torch.int32) + 11, all_greedy=False,
    )  # fmt: skip


def filtered(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """float64 probabilities after the filters, one after the other; 0 for removed tokens. Of equal probabilities at an edge all remain."""
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
def test_draws_invert_the_filtered_distribution(module: ModuleType, vocab: int, filters: dict) -> None:
    logits = torch.randn(2, vocab) * 3
    draw = params(2, **filters)
    drawn = module.sample(logits, draw)
    assert drawn.dtype == torch.int32
    uniform = reference.uniform(draw.seeds, draw.counters).double()
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    for row in range(2):
        probs = filtered(logits[row], **full)
        token = int(drawn[row])
        assert probs[token] > 0, "a removed token was drawn"
        upper = probs.cumsum(0) / probs.sum()
        assert upper[token] - probs[token] / probs.sum() - 2e-6 <= uniform[row] <= upper[token] + 2e-6


@EACH
def test_a_greedy_row_in_a_mixed_batch_and_alone(module: ModuleType) -> None:
    logits = torch.randn(3, 9001)
    draw = params(3)
    draw.temperature[1] = 0.0
    assert module.sample(logits, draw)[1] == logits[1].argmax()
    draw.all_greedy = True
    assert torch.equal(module.sample(logits, draw), logits.argmax(1).int())


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits(module: ModuleType, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5000).to(dtype)
    draw = params(3, top_k=4)
    drawn = module.sample(logits, draw)
    for row in range(3):
        assert logits[row, drawn[row]] >= logits[row].float().sort(descending=True).values[3]
    draw.all_greedy = True
    chosen = module.sample(logits, draw).long()
    assert torch.equal(logits.gather(1, chosen[:, None])[:, 0], logits.max(1).values)


@EACH
def test_ties_at_an_edge_all_remain(module: ModuleType) -> None:
    logits = torch.full((10, 5000), -4.0)
    logits[:, [7, 4095, 4096, 4999]] = 6.0
    for filters in ({"top_k": 2}, {"top_p": 0.3}):
        drawn = module.sample(logits, params(10, **filters))
        assert set(drawn.tolist()) == {7, 4095, 4096, 4999}


@EACH
def test_greedy_selects_the_first_of_equal_logits(module: ModuleType) -> None:
    logits = torch.zeros(4, 9001)
    logits[0, [8191, 8192]] = 1.0
    logits[1, [17, 300, 4444, 8190]] = 1.0
    logits[2, :8999] = float("-inf")
    draw = params(4, temperature=0.0)
    assert module.sample(logits, draw).tolist() == [8191, 17, 8999, 0]


@EACH
def test_a_row_without_a_finite_maximum_is_reported_alone(module: ModuleType) -> None:
    """Rows with one such value and rows of nothing else, next to others."""
    logits = torch.randn(8, 9001)
    draw = params(8, top_p=0.9)
    expected = module.sample(logits, draw)
    for value, one, whole in ((float("nan"), 1, 2), (float("inf"), 3, 5), (float("-inf"), 4, 6)):
        logits[one, 8500], logits[whole] = value, value
    greedy, others = logits.argmax(1).int(), [0, 7]
    for all_greedy in (False, True):
        draw.all_greedy = all_greedy
        found = module.sample(logits, draw)
        assert found[[1, 2, 3, 5, 6]].tolist() == [-1] * 5 and found[4] != -1
        assert torch.equal(found[others], greedy[others] if all_greedy else expected[others])


@EACH
def test_banned_tokens_are_never_drawn(module: ModuleType) -> None:
    logits = torch.full((6, 5000), float("-inf"))
    logits[:, 4500] = -80.0
    logits[:, 3] = -80.0
    drawn = module.sample(logits, params(6, temperature=1.7))
    assert set(drawn.tolist()) == {3, 4500}


@EACH
def test_a_padded_table_and_no_rows(module: ModuleType) -> None:
    wide = torch.randn(3, 6000)
    assert torch.equal(module.sample(wide[:, :4500], params(3)), module.sample(wide[:, :4500].contiguous(), params(3)))
    assert module.sample(torch.empty(0, 100), params(0)).shape == (0,)


def test_kernel_and_reference_draw_the_same_tokens() -> None:
    logits = torch.randn(20, 4097) * 2
    draw = params(20, temperature=0.8)
    draw.top_k[::3], draw.top_p[::2], draw.min_p[::5] = 40, 0.9, 0.02
    same = reference.sample(logits, draw) == kernels.sample(logits, draw)
    assert same.sum() >= 19, "more differences than rounding at the edges of tokens explains"


@EACH
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities(module: ModuleType, num_top: int) -> None:
    logits = torch.randn(5, 4097).bfloat16()
    token_ids = torch.tensor([0, 4096, 17, 17, 4000], dtype=torch.int32)
    chosen, best, ids = module.logprobs(logits, token_ids, num_top)
    expected = torch.log_softmax(logits.double(), 1)
    assert torch.allclose(chosen.double(), expected.gather(1, token_ids.long()[:, None])[:, 0], atol=1e-5)
    assert best.shape == ids.shape == (5, num_top) and ids.dtype == torch.int32
    assert torch.allclose(best.double(), expected.sort(descending=True).values[:, :num_top], atol=1e-5)
    assert torch.allclose(expected.gather(1, ids.long()), best.double(), atol=1e-5)


@EACH
@pytest.mark.parametrize("max_drafts", [1, 3, 5])
def test_verification_accepts_the_drafts_before_the_first_difference(module: ModuleType, max_drafts: int) -> None:
    """Random sequences with 0 to max_drafts drafts, padding without rows, prompts before the drafts, and rows without a token (-1)."""
    random = torch.Generator().manual_seed(max_drafts)
    counts = torch.randint(0, max_drafts + 1, (40,), generator=random).tolist()
    token_ids, logits_idx, starts, sampled = [], [], [0], []
    expected: list[list[int]] = []
    for count in counts:
        token_ids += [9] * int(torch.randint(0, 3, (1,), generator=random))
        drafts = torch.randint(0, 2, (count,), generator=random).tolist()
        ids = torch.randint(0, 2, (count + 1,), generator=random).tolist()
        if torch.rand((), generator=random) < 0.2:
            ids[int(torch.randint(0, count + 1, (1,), generator=random))] = -1
        logits_idx += range(len(token_ids), len(token_ids) + count + 1)
        token_ids += [0, *drafts]
        sampled += ids
        starts.append(len(sampled))
        accepted = next((i for i, (draft, token) in enumerate(zip(drafts, ids, strict=False)) if draft != token), count)
        expected.append(ids[: accepted + 1])
    parents = [max(node - 1, 0) for count in counts for node in range(count + 1)]
    arguments = [torch.tensor(values, dtype=torch.int32) for values in (sampled, token_ids, logits_idx, [*starts, starts[-1]], parents)]
    masks = torch.full((len(token_ids),), -1)
    masks[torch.tensor(logits_idx)] = torch.tensor([(2 << node) - 1 for count in counts for node in range(count + 1)])
    ids, num_accepted, newest, last, is_yielded = module.verify(*arguments, masks, max_drafts)
    assert last.tolist()[:-1] == [start + len(row) - 1 for start, row in zip(starts, expected, strict=False)]
    assert is_yielded.tolist() == [i < len(row) for count, row in zip(counts, expected, strict=True) for i in range(count + 1)]
    assert ids.tolist() == [row + [-1] * (max_drafts + 1 - len(row)) for row in [*expected, []]]
    assert num_accepted.tolist() == [len(row) - 1 for row in expected] + [0]
    assert newest.tolist() == [row[-1] for row in expected] + [-1]


@EACH
@pytest.mark.parametrize("max_drafts", [2, 7, 63])
def test_verification_accepts_the_path_of_a_tree(module: ModuleType, max_drafts: int) -> None:
    """Random trees whose siblings are different tokens, where each node samples one of its children, another token, or nothing."""
    rng = random.Random(max_drafts)
    columns: dict[str, list[int]] = {name: [] for name in ("sampled", "token_ids", "logits_idx", "parents", "masks")}
    starts, expected, rows = [0], list[list[int]](), list[list[int]]()
    for _ in range(30):
        count = rng.choice((0, rng.randrange(max_drafts + 1), max_drafts))
        parents, masks, ids = [0], [1], [9]
        for node in range(1, count + 1):
            parent = rng.randrange(max(node - 4, 0), node)
            taken = [ids[i] for i in range(1, node) if parents[i] == parent]
            parents.append(parent)
            masks.append(masks[parent] | 1 << node)
            ids.append(rng.choice([token for token in range(70) if token not in taken]))
        sampled = []
        for node in range(count + 1):
            children = [ids[i] for i in range(1, count + 1) if parents[i] == node]
            sampled.append(rng.choice(children) if children and rng.random() < 0.9 else rng.choice((-1, 77)))
        path = [0]
        while child := next((i for i in range(1, count + 1) if parents[i] == path[-1] and ids[i] == sampled[path[-1]]), 0):
            path.append(child)
        columns["logits_idx"] += range(len(columns["token_ids"]) + 1, len(columns["token_ids"]) + 2 + count)
        columns["token_ids"] += [5, *ids]
        columns["masks"] += [0, *(mask - (mask >> 63 << 64) for mask in masks)]
        columns["parents"] += parents
        columns["sampled"] += sampled
        expected.append([sampled[node] for node in path])
        rows.append([starts[-1] + node for node in path])
        starts.append(starts[-1] + count + 1)
    tensors = {name: torch.tensor(values, dtype=torch.int64 if name == "masks" else torch.int32) for name, values in columns.items()}
    ids, num_accepted, newest, last, is_yielded = module.verify(
        tensors["sampled"], tensors["token_ids"], tensors["logits_idx"], torch.tensor(starts, dtype=torch.int32), tensors["parents"],
        tensors["masks"], max_drafts,
    )  # fmt: skip
    assert ids.tolist() == [row + [-1] * (max_drafts + 1 - len(row)) for row in expected]
    assert num_accepted.tolist() == [len(row) - 1 for row in expected]
    assert newest.tolist() == [row[-1] for row in expected]
    assert last.tolist() == [row[-1] for row in rows]
    assert is_yielded.nonzero().flatten().tolist() == [row for path in rows for row in path]


@EACH
@pytest.mark.parametrize(("num_ranks", "vocab"), [(2, 9001), (2, 5), (3, 9001), (4, 16384), (4, 5), (6, 5)])
def test_ranks_with_shards_find_the_greedy_tokens_of_all_logits(module: ModuleType, num_ranks: int, vocab: int) -> None:
    """Ties within a shard and between shards, rows with NaN and infinities anywhere, and padding with values above all logits."""
    rng = random.Random(vocab + num_ranks)
    logits = torch.randint(-4, 4, (7, vocab)).bfloat16()
    logits[1], logits[2] = float("-inf"), -3.0
    for row, value in enumerate((float("nan"), float("inf"), float("-inf")), 3):
        logits[row, rng.randrange(vocab)] = value
    logits[6] = torch.randn(vocab).bfloat16()
    size = -(-vocab // num_ranks)
    shards = torch.nn.functional.pad(logits, (0, num_ranks * size - vocab), value=9.0).split(size, 1)
    pairs = [module.largest_of_shard(shard, vocab - rank * size, rank, num_ranks) for rank, shard in enumerate(shards)]
    greedy = module.sample(logits, dataclasses.replace(params(7), all_greedy=True))
    assert torch.equal(module.largest_over_ranks(torch.stack(pairs).sum(0)), greedy)
    assert greedy[[1, 3, 4]].tolist() == [-1, -1, -1]
