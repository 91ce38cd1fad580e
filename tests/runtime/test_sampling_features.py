"""Every field of SamplingParams through the executor, compared with the logits of transformers and a direct implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drive import END, Driven, logits_of, plain_decode, request
from torch import Tensor

from stoker.base.types import FinishReason, Guide
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.logprobs import Logprobs
from stoker.runtime.sampling.prompt_logprobs import PromptChunk, PromptLogprobs, PromptScores

Make = Callable[..., Driven]
COUNT = 12


def check_greedy(
    drive: Make, model: Any, prompts: list[list[int]], change: Callable[[Tensor, list[int], list[int]], Tensor], **params: Any
) -> None:
    """Tokens are those with the largest logits after `change(logits, prompt, generated)`, for all prompts in one batch."""
    answers = drive(max_num_tokens=32).run(*(request(prompt, max_tokens=COUNT, **params) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == plain_decode(model, prompt, COUNT, lambda row, ids, prompt=prompt: change(row, prompt, ids))
        assert answer.reason is FinishReason.LENGTH


def test_greedy(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    check_greedy(drive, model, prompts, lambda row, _, __: row)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.7, 0.0, 0.0), (0.6, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, -0.8), (1.3, 0.4, 0.7)]
)
def test_penalties(drive: Make, model: Any, prompts: list[list[int]], repetition: float, presence: float, frequency: float) -> None:
    def change(row: Tensor, prompt: list[int], generated: list[int]) -> Tensor:
        for token in {*prompt, *generated}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(generated):
            row[token] -= presence + frequency * generated.count(token)
        return row

    values = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    check_greedy(drive, model, prompts, change, **values)


def test_logit_bias(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    bias = {5: 3.0, 77: -100.0, 300: 2.5, 8: 0.25}

    def change(row: Tensor, *_: object) -> Tensor:
        for token, value in bias.items():
            row[token] += value
        return row

    check_greedy(drive, model, prompts, change, logit_bias=bias)


def test_a_bias_beyond_float32_is_clipped(drive: Make, prompts: list[list[int]]) -> None:
    answers = drive().run(
        request(prompts[0], max_tokens=3, logit_bias={9: 1e300}),
        request(prompts[0], max_tokens=3, temperature=1.0, logit_bias={9: 1e300, 10: -1e300}),
    )
    assert [answer.tokens for answer in answers] == [[9, 9, 9]] * 2


@pytest.mark.parametrize("repetition", [0.01, 100.0])
def test_the_bounds_of_the_repetition_penalty_with_the_largest_biases(drive: Make, prompts: list[list[int]], repetition: float) -> None:
    """No logit becomes infinite or NaN, which would end the sequence with an error."""
    biases = {token: 1e300 if token % 2 else -1e300 for token in prompts[0]}
    extremes: dict[str, Any] = {"repetition_penalty": repetition, "presence_penalty": -100.0, "frequency_penalty": 100.0, "max_tokens": 4}
    answers = drive().run(
        request(prompts[0], **extremes),
        request(prompts[0], **extremes, temperature=1.0, seed=1, logprobs=5),
        request(prompts[0], **extremes, temperature=1.0, seed=1, logit_bias=biases, logprobs=5),
        request(prompts[0], **extremes, logit_bias=biases, logprobs=5),
    )
    assert [(len(answer.tokens), answer.error) for answer in answers] == [(4, None)] * 4


ALLOWED = (5, 40, 41, 77, 200, 300, 77)


def test_allowed_token_ids(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    """Alone, and with the other features that change logits; computed in float64."""

    def change(row: Tensor, prompt: list[int], generated: list[int]) -> Tensor:
        masked = torch.full_like(row, -math.inf, dtype=torch.float64)
        masked[list(ALLOWED)] = row[list(ALLOWED)].double()
        return masked

    def change_more(row: Tensor, prompt: list[int], generated: list[int]) -> Tensor:
        row = change(row, prompt, generated)
        row[5] += 2.5
        row[9] += 100.0
        for token in {*prompt, *generated}:
            row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
        row[77] = -math.inf
        if generated[-1:] == [40]:
            row[41] = -math.inf
        return row

    check_greedy(drive, model, prompts, change, allowed_token_ids=ALLOWED)
    more = {"logit_bias": {5: 2.5, 9: 100.0}, "repetition_penalty": 1.3, "bad_words": ((77,), (40, 41))}
    check_greedy(drive, model, prompts, change_more, allowed_token_ids=ALLOWED, **more)


def test_draws_are_among_the_allowed_ids(drive: Make, prompts: list[list[int]]) -> None:
    """A row's own ids, whatever other rows allow; an end id that is not among them does not end the sequence."""
    sampled = {"temperature": 2.0, "seed": 3, "max_tokens": 30, "n": 2, "end_ids": (END,)}
    first, second = request(prompts[0], allowed_token_ids=ALLOWED, **sampled), request(prompts[1], allowed_token_ids=(END, 3), **sampled)
    driven = drive()
    answers = driven.run(
        first, second, request(prompts[2], **sampled), request(prompts[3], allowed_token_ids=(7,), min_tokens=9, max_tokens=9)
    )
    assert {token for answer in answers[:2] for token in answer.tokens} == set(ALLOWED)
    assert {token for answer in answers[2:4] for token in answer.tokens} <= {END, 3}
    assert all(answer.tokens[-1] == END and answer.reason is FinishReason.STOP for answer in answers[2:4])
    assert not {token for answer in answers[4:6] for token in answer.tokens} <= {*ALLOWED, END, 3, 7}
    assert answers[6].tokens == [7] * 9


def test_bad_words(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    usual = drive().run(request(prompts[0], max_tokens=COUNT))[0].tokens
    words = ((usual[3],), (usual[0], usual[1]), (prompts[0][-1], usual[0]), (*usual[4:7],))

    def change(row: Tensor, _: object, generated: list[int]) -> Tensor:
        for word in words:
            if tuple(generated[len(generated) - len(word) + 1 :]) == word[:-1] if len(word) > 1 else True:
                row[word[-1]] = -math.inf
        return row

    check_greedy(drive, model, prompts, change, bad_words=words)


def test_end_ids_and_stop_ids(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive()
    (usual,) = driven.run(request(prompts[1], max_tokens=COUNT))
    stop = usual.tokens[4]
    length = usual.tokens.index(stop) + 1
    unused = next(token for token in range(320) if token not in usual.tokens)
    by_id, by_end, ignored = driven.run(
        request(prompts[1], max_tokens=COUNT, stop_token_ids=(stop, unused)),
        request(prompts[1], max_tokens=COUNT, end_ids=(stop,)),
        request(prompts[1], max_tokens=COUNT, ignore_eos=True),
    )
    for answer in (by_id, by_end):
        assert (answer.tokens, answer.reason, answer.stop_id) == (usual.tokens[:length], FinishReason.STOP, stop)
    assert (ignored.tokens, ignored.reason) == (usual.tokens, FinishReason.LENGTH)


def test_min_tokens(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    driven = drive()
    stop = driven.run(request(prompts[0], max_tokens=COUNT))[0].tokens[0]
    (answer,) = driven.run(request(prompts[0], max_tokens=COUNT, min_tokens=5, end_ids=(stop,), logit_bias={stop: 50.0}))

    def change(row: Tensor, generated: list[int]) -> Tensor:
        row[stop] = -math.inf if len(generated) < 5 else row[stop] + 50.0
        return row

    assert answer.tokens == plain_decode(model, prompts[0], 6, change) and answer.tokens[-1] == stop
    assert answer.stop_id == stop


SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": COUNT}


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(drive: Make, prompts: list[list[int]]) -> None:
    alone = drive()
    expected = [alone.run(request(prompt, n=3, presence_penalty=0.3, **SAMPLED)) for prompt in prompts]
    tokens = [answer.tokens for answers in expected for answer in answers]
    assert len({tuple(ids) for ids in tokens}) == len(tokens), "sequences of a request have equal tokens"
    batch = drive(policy="max_utilization", max_num_tokens=16, kv_cache_tokens=8 * 16)
    strangers = [request(prompt[::-1] * 2, temperature=1.0, max_tokens=20) for prompt in prompts]
    requests = [request(prompt, n=3, presence_penalty=0.3, **SAMPLED) for prompt in prompts]
    answers = batch.run(*(item for pair in zip(strangers, requests, strict=True) for item in pair))
    found = [batch.answers[one.request_id, index].tokens for one in requests for index in range(3)]
    assert found == tokens and batch.stats.num_preemptions > 0 and len(answers) == 4 * len(prompts)


def test_a_row_that_sampled_is_greedy_for_the_next_sequence(drive: Make, prompts: list[list[int]]) -> None:
    (expected,) = drive().run(request(prompts[0], max_tokens=COUNT))
    driven = drive(max_batch_size=2)
    beside, short = request(prompts[1], max_tokens=40, temperature=5.0, seed=1), request(prompts[2], max_tokens=4, temperature=5.0, seed=2)
    assert driven.run(beside, short, request(prompts[0], max_tokens=COUNT))[2].tokens == expected.tokens


def test_other_seeds_and_no_seed_give_other_tokens(drive: Make, prompts: list[list[int]]) -> None:
    requests = [request(prompts[0], **SAMPLED | {"seed": seed}) for seed in (1, 2, -5, 2**64 - 1, None, None)]
    assert len({tuple(answer.tokens) for answer in drive().run(*requests)}) == 6


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.8}, {"temperature": 1.0, "top_k": 6}, {"temperature": 1.3, "top_p": 0.4}, {"temperature": 1.0, "min_p": 0.25},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.8, "min_p": 0.1},
]  # fmt: skip


def filtered_probs(row: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Float64 probabilities after temperature, top-k, top-p and min-p."""
    probs = torch.softmax(row / temperature, 0)
    order = probs.sort(descending=True)
    inside = torch.ones_like(probs, dtype=torch.bool)
    if top_k:
        inside &= torch.arange(len(row)) < top_k
    mass = (order.values * inside).cumsum(0)
    inside &= mass - order.values < top_p * (order.values * inside).sum()
    inside &= order.values >= min_p * order.values[0]
    left = torch.zeros_like(probs).scatter_(0, order.indices, order.values * inside)
    return left / left.sum()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_distribution(drive: Make, model: Any, prompts: list[list[int]], filters: dict[str, Any]) -> None:
    """Pearson's test at 4 standard deviations (with Wilson and Hilferty's approximation). Seeds are fixed, so the result is stable."""
    prompt = prompts[0]
    probs = filtered_probs(logits_of(model, prompt)[-1], **filters)
    answers = drive(max_queue_size=4096).run(*(request(prompt, n=64, max_tokens=1, seed=seed, **filters) for seed in range(24)))
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0, "a token outside the filter was sampled"
    expected = probs * len(answers)
    frequent = expected >= 8
    cells = torch.cat((counts[frequent], counts[~frequent].sum()[None])), torch.cat((expected[frequent], expected[~frequent].sum()[None]))
    statistic = float(((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1e-9)).sum())
    freedom = int(frequent.sum()) - (0 if cells[1][-1] > 0 else 1)
    assert freedom >= 3
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def test_log_probabilities_equal_those_of_a_forward_pass(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    driven = drive(max_num_tokens=16)
    driven.run(request(prompts[1], max_tokens=1))  # its blocks are indexed, and requests for prompt_logprobs must not use them
    requests = [
        request(prompt, max_tokens=5, logprobs=3, prompt_logprobs=k, temperature=1.0, seed=4, logit_bias={7: 5.0})
        for k, prompt in enumerate(prompts[:4])
    ]
    for k, (one, answer) in enumerate(zip(requests, driven.run(*requests), strict=True)):
        prompt = one.prompt_ids
        table = torch.log_softmax(logits_of(model, [*prompt, *answer.tokens]), -1)
        assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(prompt)
        entries = [(i, entry, k) for i, entry in enumerate(answer.prompt_logprobs[1:])]
        entries += [(len(prompt) - 1 + i, entry, 3) for i, entry in enumerate(answer.logprobs)]
        assert len(answer.logprobs) == len(answer.tokens) == 5
        for at, entry, num_top in entries:
            assert entry is not None
            token = [*prompt, *answer.tokens][at + 1]
            best = table[at].sort(descending=True)
            assert entry.token_id == token and abs(entry.logprob - table[at, token]) < 1e-4
            assert [token for token, _ in entry.top] == best.indices[:num_top].tolist()
            assert all(abs(value - expected) < 1e-4 for (_, value), expected in zip(entry.top, best.values.tolist(), strict=False))


def test_prompt_scores_continue_after_a_preemption_in_other_chunks() -> None:
    seq = Sequence(0, request([5, 6, 7, 8, 9], max_tokens=1, prompt_logprobs=0), 0, 0.0)
    scores = PromptScores()
    scores.add(seq)

    def collect(start: int, end: int, value: float, samples: bool = False) -> PromptLogprobs:
        targets = np.array(seq.tokens[start + 1 : end + 1], dtype=np.int32)
        empty = torch.empty(len(targets), 0)
        return scores.collect(
            [(PromptChunk(seq, start, 0, targets), Logprobs(torch.full((len(targets),), value), empty, empty))], [seq] * samples
        )

    assert not collect(0, 2, -1.0)
    assert not collect(0, 1, -2.0) and not collect(1, 3, -2.0)
    assert not collect(3, 4, -3.0)
    (entries,) = scores.collect([], [seq]).values()
    assert [(entry.token_id, entry.logprob) for entry in entries[1:] if entry] == [(6, -1.0), (7, -1.0), (8, -2.0), (9, -3.0)]
    assert not collect(0, 4, -1.0, samples=True) and not scores._partial
    scores.add(seq)
    scores.remove(0)
    assert not collect(0, 4, -1.0, samples=True) and not scores._partial


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 32, 33])
def test_prompt_scores_do_not_depend_on_the_chunks(drive: Make, prompts: list[list[int]], size: int) -> None:
    """A chunk of 16 that ends before the last token of 17 or 33 completes the scores one step before a token is sampled."""
    scored = request((prompts[1] + prompts[4])[:size], max_tokens=2, prompt_logprobs=1)
    whole, cut = drive().run(scored)[0].prompt_logprobs, drive(max_num_tokens=16).run(scored)[0].prompt_logprobs
    assert whole is not None and cut is not None and len(whole) == len(cut) == size
    for one, other in zip(whole[1:], cut[1:], strict=True):
        assert one is not None and other is not None and one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-4


def test_features_do_not_affect_other_rows(drive: Make, model: Any, prompts: list[list[int]]) -> None:
    plain, *_ = drive().run(
        request(prompts[0], max_tokens=COUNT), request(prompts[0], max_tokens=COUNT, logit_bias={3: 99.0}),
        request(prompts[0], max_tokens=COUNT, repetition_penalty=3.0), request(prompts[0], max_tokens=COUNT, bad_words=((4,), (5,))),
        request(prompts[0], max_tokens=COUNT, min_tokens=3, end_ids=(END,)), request(prompts[0], max_tokens=COUNT, temperature=5.0, seed=1),
    )  # fmt: skip
    assert plain.tokens == plain_decode(model, prompts[0], COUNT, lambda row, _: row)


def test_features_are_applied_in_one_order_whatever_the_other_rows_use(drive: Make, prompts: list[list[int]]) -> None:
    """A bias is added before penalties, and a grammar that allows only an end id lowers the minimum length before ids are banned."""
    biased: dict[str, Any] = {"logit_bias": dict.fromkeys(range(3, 40), 2.0), "repetition_penalty": 3.0}
    guided: dict[str, Any] = {"guide": Guide("regex", "[a-c]{2}"), "end_ids": (END,), "min_tokens": 8}
    others: list[dict[str, Any]] = [{"repetition_penalty": 1.1}, {"min_tokens": 3, "end_ids": (END,)}]  # later features come first
    for params in (biased, guided):
        (alone,) = drive().run(request(prompts[1], max_tokens=COUNT, **params))
        *_, beside = drive().run(*(request(prompts[1], max_tokens=COUNT, **each) for each in (*others, params)))
        assert (beside.tokens, beside.reason) == (alone.tokens, alone.reason)


def test_banning_every_token_ends_only_that_request(drive: Make, prompts: list[list[int]]) -> None:
    all_tokens = tuple((token,) for token in range(320))
    driven = drive()
    banned, other = driven.run(request(prompts[0], max_tokens=4, bad_words=all_tokens), request(prompts[1], max_tokens=4))
    assert banned.reason is FinishReason.ERROR and banned.error is not None and "banned" in banned.error.message
    assert other.reason is FinishReason.LENGTH
    assert driven.run(request(prompts[1], max_tokens=4))[0].tokens == other.tokens
