"""The sampler with draft tokens: the distribution of its tokens, and equality with one token per step for all features."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.base.draft_tree import node_depths
from stoker.base.types import SamplingParams
from stoker.kernels.reference import sampling as reference
from stoker.kernels.types import DrawParams
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.sampling.draft_probabilities import draw_with_drafts
from stoker.runtime.sampling.sampler import DraftedRows, Sampler
from stoker.runtime.sampling.verification import StepDrafts, node_masks, verify, yielded_ids

VOCAB, DRAWS = 16, 200_000
FILTERS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 1.6, "top_k": 9, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.02}]


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The distribution of the definition, in float64."""
    probs = torch.softmax(logits.double() / temperature, 0)
    limit = min_p * probs.max()
    if top_k:
        probs = torch.where(probs >= probs.sort(descending=True).values[top_k - 1], probs, 0)
    if top_p < 1:
        order = probs.sort(descending=True).values
        before = order.cumsum(0) - order
        probs = torch.where(probs >= order[before < top_p * probs.sum()][-1], probs, 0)
    probs = torch.where(probs >= limit, probs, 0)
    return probs / probs.sum()


def chi_square(tokens: Tensor, expected: Tensor) -> float:
    """The p-value of the counts of `tokens` under the distribution `expected` [VOCAB]."""
    counts = torch.bincount(tokens.long(), minlength=VOCAB).double()
    possible = expected > 0
    assert not counts[~possible].any()
    wanted = expected[possible] * counts.sum()
    statistic = ((counts[possible] - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc((possible.sum().double() - 1) / 2, statistic / 2))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_distribution_is_that_of_plain_sampling(filters: dict[str, Any]) -> None:
    """DRAWS sequences with one draft each, drawn from another distribution: the first token of each, and the second where there is one."""
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(2, VOCAB, generator=generator) * 1.5
    drafts = torch.multinomial(torch.softmax(torch.randn(VOCAB, generator=generator), 0), DRAWS, True, generator=generator).int()
    rows = 2 * DRAWS
    logits = torch.stack((first, second)).repeat(DRAWS, 1)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    seeds = torch.randint(-(2**62), 2**62, (DRAWS,), generator=generator).repeat_interleave(2)
    draw = DrawParams(
        temperature=torch.full((rows,), options["temperature"]), top_k=torch.full((rows,), options["top_k"], dtype=torch.int32),
        top_p=torch.full((rows,), options["top_p"]), min_p=torch.full((rows,), options["min_p"]), seeds=seeds,
        counters=torch.tensor([7, 8], dtype=torch.int32).repeat(DRAWS), all_greedy=False,
    )  # fmt: skip
    token_ids = torch.stack((torch.zeros(DRAWS, dtype=torch.int32), drafts), 1).flatten()
    starts = torch.arange(DRAWS + 1, dtype=torch.int32) * 2
    owners = torch.arange(rows, dtype=torch.int32) // 2
    nodes = torch.arange(rows)
    parents, masks = torch.zeros(rows, dtype=torch.int32), 1 + 2 * (nodes % 2)
    verified = verify(reference.sample(logits, draw), StepDrafts(token_ids, nodes.int(), starts, owners, parents, masks, 1))
    accepted = verified.num_accepted == 1
    expected = probabilities(first, **filters)
    assert chi_square(verified.token_ids[:, 0], expected) > 1e-4
    assert chi_square(verified.token_ids[accepted, 1], probabilities(second, **filters)) > 1e-4
    assert torch.equal(verified.token_ids[accepted, 0], drafts[accepted])
    # A draft is accepted with its probability, which no method exceeds for drafts without probabilities.
    rate = float(accepted.double().mean())
    proposed = torch.bincount(drafts.long(), minlength=VOCAB).double() / DRAWS
    assert abs(rate - float((proposed * expected).sum())) < 5 / DRAWS**0.5


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drafts_with_probabilities_preserve_the_distribution(filters: dict[str, Any]) -> None:
    """DRAWS drafts from another distribution q: they are accepted with the probability sum of min(p, q), the largest possible."""
    generator = torch.Generator().manual_seed(6)
    target, other = torch.randn(2, VOCAB, generator=generator) * 1.5
    other[3] = -torch.inf
    proposed = torch.softmax(other.double(), 0)
    drafts = torch.multinomial(proposed, DRAWS, True, generator=generator).int()
    draw = draw_params(filters, torch.randint(-(2**62), 2**62, (DRAWS,), generator=generator))
    found = draw_with_drafts(target.expand(DRAWS, -1), draw, drafts, other.expand(DRAWS, -1))
    expected = probabilities(target, **filters)
    assert chi_square(found, expected) > 1e-4
    best = float(torch.minimum(expected, proposed).sum())
    assert abs(float((found == drafts).double().mean()) - best) < 3 / DRAWS**0.5
    # Tokens that are known given the draft: a rejected draft is never drawn again, and what replaces it has p > q.
    assert bool((expected > proposed)[found[found != drafts].long()].all())


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drafts_with_the_random_number_of_the_position(filters: dict[str, Any]) -> None:
    """A draft engine samples with the random number of the model. Similar distributions agree more often than independent draws do."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB, generator=generator) * 1.5
    similar = target + torch.randn(VOCAB, generator=generator) * 0.2
    draw = draw_params(filters, torch.randint(-(2**62), 2**62, (DRAWS,), generator=generator))
    drafts = reference.sample(similar.expand(DRAWS, -1), draw)
    sampled = reference.sample(target.expand(DRAWS, -1), draw)
    expected, proposed = probabilities(target, **filters), probabilities(similar, **filters)
    assert chi_square(sampled, expected) > 1e-4 and chi_square(drafts, proposed) > 1e-4
    agreed = float((drafts == sampled).double().mean())
    assert float((proposed * expected).sum()) + 0.2 < agreed <= float(torch.minimum(proposed, expected).sum()) + 3 / DRAWS**0.5


def draw_params(filters: dict[str, Any], seeds: Tensor) -> DrawParams:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    count = len(seeds)
    return DrawParams(
        temperature=torch.full((count,), options["temperature"]), top_k=torch.full((count,), options["top_k"], dtype=torch.int32),
        top_p=torch.full((count,), options["top_p"]), min_p=torch.full((count,), options["min_p"]), seeds=seeds,
        counters=torch.full((count,), 7, dtype=torch.int32), all_greedy=False,
    )  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_distribution_of_trees_is_that_of_plain_sampling(filters: dict[str, Any]) -> None:
    """DRAWS / 2 sequences with three drafts after the newest token, and two after the first of them, drawn from another distribution."""
    generator, count = torch.Generator().manual_seed(6), DRAWS // 2
    parents, counters = [0, 0, 0, 0, 1, 1], [7, 8, 8, 8, 9, 9]
    first, second, third = torch.randn(3, VOCAB, generator=generator) * 1.5  # the logits at the three depths
    proposed = torch.softmax(torch.randn(VOCAB, generator=generator), 0).expand(count, -1)
    drafts = torch.cat([torch.multinomial(proposed, size, generator=generator).int() for size in (3, 2)], 1)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    rows = 6 * count
    draw = DrawParams(
        temperature=torch.full((rows,), options["temperature"]), top_k=torch.full((rows,), options["top_k"], dtype=torch.int32),
        top_p=torch.full((rows,), options["top_p"]), min_p=torch.full((rows,), options["min_p"]),
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator).repeat_interleave(6),
        counters=torch.tensor(counters, dtype=torch.int32).repeat(count), all_greedy=False,
    )  # fmt: skip
    tensors = StepDrafts(
        torch.cat((torch.zeros(count, 1, dtype=torch.int32), drafts), 1).flatten(), torch.arange(rows, dtype=torch.int32),
        torch.arange(count + 1, dtype=torch.int32) * 6, torch.arange(rows, dtype=torch.int32) // 6,
        torch.tensor(parents, dtype=torch.int32).repeat(count), torch.from_numpy(node_masks(tuple(parents[1:])).copy()).repeat(count), 5,
    )  # fmt: skip
    verified = verify(reference.sample(torch.stack((first, second, second, second, third, third)).repeat(count, 1), draw), tensors)
    found, num_accepted = verified.token_ids, verified.num_accepted
    for at, logits in enumerate((first, second, third)):
        assert chi_square(found[num_accepted >= at, at], probabilities(logits, **filters)) > 1e-4
    is_drafted = (drafts[:, :3] == found[:, :1]).any(1)
    assert torch.equal(num_accepted >= 1, is_drafted)  # by any of the three
    assert torch.equal(num_accepted == 2, (drafts[:, 0] == found[:, 0]) & (drafts[:, 3:] == found[:, 1:2]).any(1))


def logits_after(tokens: list[int]) -> Tensor:
    """The logits of a model that depends on all tokens."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(zlib.crc32(bytes(tokens)))) * 2


def random_params(rng: random.Random) -> SamplingParams:
    """Parameters with any of the features."""
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.8, 1.5)), "seed": rng.randrange(100), "top_k": rng.choice((0, 5)),
        "top_p": rng.choice((1.0, 0.8)), "repetition_penalty": rng.choice((1.0, 1.4)), "frequency_penalty": rng.choice((0.0, 0.6)),
        "presence_penalty": rng.choice((0.0, 0.3)),
        "logit_bias": rng.choice(({}, {3: 2.0, 5: -1.0})), "allowed_token_ids": rng.choice((None, tuple(range(10)))),
        "bad_words": rng.choice(((), ((4,), (1, 2), (3, 3, 3)))), "min_tokens": rng.choice((0, 6)), "logprobs": rng.choice((None, 2)),
        "stop_token_ids": (7,), "max_tokens": 40,
    }  # fmt: skip
    return SamplingParams(**options)


def step(
    sampler: Sampler, sequences: list[Sequence], drafts: list[list[int]], parents: list[tuple[int, ...]]
) -> tuple[list[list[int]], list[list[float]]]:
    """One step of the sampler. Returns the tokens that each sequence yields, and their log-probabilities."""
    token_ids, logits, counters = [], [], []
    for seq, ids, above in zip(sequences, drafts, parents, strict=True):
        seq.num_pending = 1 + len(ids)
        token_ids += [seq.tokens[-1], *ids]
        paths: list[list[int]] = [[]]
        for draft, parent in zip(ids, above, strict=True):
            paths.append([*paths[parent], draft])
        logits += [logits_after([*seq.tokens, *path]) for path in paths]
        counters += [len(seq.tokens) + len(path) for path in paths]
    counts = torch.tensor([len(ids) + 1 for ids in drafts])
    owners = torch.arange(len(sequences)).repeat_interleave(counts).int()
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    tensors = StepDrafts(
        torch.tensor(token_ids, dtype=torch.int32), torch.arange(len(token_ids), dtype=torch.int32), starts, owners,
        torch.tensor([parent for above in parents for parent in (0, *above)], dtype=torch.int32),
        torch.cat([torch.from_numpy(node_masks(above).copy()) for above in parents]), max(map(len, drafts)),
    )  # fmt: skip
    rows = torch.tensor([sequences[owner].row for owner in owners], dtype=torch.int32)
    sampler.table.update(sequences)
    has_drafts = any(drafts)
    sampled = sampler.sample(
        torch.stack(logits), rows, torch.tensor(counters, dtype=torch.int32), sequences, [],
        DraftedRows(list(drafts), list(parents), tensors) if has_drafts else None,
    )  # fmt: skip
    found = yielded_ids(sampled.verified.yielded) if sampled.verified is not None else sampled.token_ids.unsqueeze(1).tolist()
    chosen = sampled.logprobs.chosen if sampled.logprobs is not None else torch.zeros(len(rows))
    is_yielded = sampled.verified.is_yielded if sampled.verified is not None else torch.ones(len(rows), dtype=torch.bool)
    for seq in sequences:
        seq.num_pending = 0
    return found, [chosen[(owners == i) & is_yielded].tolist() for i in range(len(sequences))]


def random_drafts(rng: random.Random, following: list[int], is_tree: bool) -> tuple[list[int], tuple[int, ...]]:
    """Drafts of which most are the tokens `following`, and their parents: a chain, or a tree with different siblings."""
    count = rng.randrange(0, 5 + 4 * is_tree)
    parents = tuple(rng.randrange(max(0, i - 2), i + 1) if is_tree else i for i in range(count))
    depths, ids = node_depths(parents), list[int]()
    for i, parent in enumerate(parents):
        taken = [ids[j] for j in range(i) if parents[j] == parent]
        right = following[depths[i + 1] - 1 : depths[i + 1]]
        choices = [token for token in range(VOCAB) if token not in taken]
        ids.append(right[0] if right and right[0] in choices and rng.random() < 0.8 else rng.choice(choices))
    return ids, parents


@pytest.mark.parametrize("is_tree", [False, True])
def test_all_features_give_the_tokens_of_one_token_per_step(is_tree: bool) -> None:
    """Random drafts, of which most are what the sequence will generate, in batches of random sequences."""
    rng = random.Random(3)
    for _ in range(12):
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))] for _ in range(4)]
        params = [random_params(rng) for _ in prompts]
        answers: list[list[list[int]]] = []
        scores: list[list[list[float]]] = []
        for speculates in (False, True):
            sampler = Sampler(4, VOCAB, torch.device("cpu"))
            sequences = [
                Sequence(i, TokenRequest(request_id=str(i), prompt_ids=prompt, params=params[i], end_ids=(9,)), 0, 0.0)
                for i, prompt in enumerate(prompts)
            ]
            scores.append([[] for _ in prompts])
            for i, seq in enumerate(sequences):
                seq.row = i
                sampler.add(seq)
            while min(len(seq.tokens) - seq.num_prompt for seq in sequences) < 20:
                drafts: list[tuple[list[int], tuple[int, ...]]] = [([], ()) for _ in sequences]
                if speculates:
                    for i, seq in enumerate(sequences):
                        drafts[i] = random_drafts(rng, answers[0][i][len(seq.tokens) - seq.num_prompt :], is_tree)
                found, chosen = step(sampler, sequences, [ids for ids, _ in drafts], [parents for _, parents in drafts])
                for seq, ids, values in zip(sequences, found, chosen, strict=True):
                    assert min(ids) >= 0
                    seq.tokens += ids
                    if seq.params.logprobs is not None:
                        scores[-1][seq.seq_id] += values
            answers.append([seq.tokens[seq.num_prompt :] for seq in sequences])
        for plain, drafted in zip(answers[0], answers[1], strict=True):
            assert plain[:20] == drafted[:20]
        for plain_scores, drafted_scores in zip(*scores, strict=True):
            assert plain_scores[:20] == pytest.approx(drafted_scores[:20], abs=1e-4)
