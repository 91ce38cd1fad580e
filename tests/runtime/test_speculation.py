"""Speculative decoding on the CPU: every feature gives the tokens of plain decoding, whatever the drafts are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drive import END, Answer, Driven, logits_of, request
from torch import Tensor

from stoker.base.types import Guide
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.proposers import PROPOSERS
from stoker.runtime.schedule.proposers.drafter_tokens import DrafterTokens
from stoker.runtime.schedule.proposers.proposer import Proposer
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.worker.draft_runner import DraftRunner
from stoker.runtime.worker.drafter import Drafter, DraftInputs
from stoker.runtime.worker.model_runner import ModelRunner
from stoker.runtime.worker.row_tracker import RowTracker

Make = Callable[..., Driven]
COUNT = 24
FEATURES: list[dict[str, Any]] = [
    {}, {"logprobs": 3}, {"temperature": 0.9, "seed": 5, "n": 3}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.2}, {"logit_bias": {5: 3.0, 77: 2.0}},
    {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 7, "logprobs": 0, "prompt_logprobs": 1},
    {"allowed_token_ids": (5, 40, 41, 77, 200), "temperature": 2.0, "seed": 3, "bad_words": ((5, 40), (77,))},
    {"guide": Guide("regex", "(ab|c+d){3,9}"), "end_ids": (END,)},
    {"guide": Guide("json"), "end_ids": (END,), "temperature": 1.0, "seed": 9},
    {"guide": Guide("regex", "[a-c]{2}"), "end_ids": (END,), "min_tokens": 8},
    {"guide": Guide("regex", "x{4}", reasoning_end=(9,)), "end_ids": (END,), "logit_bias": {9: 6.0}, "temperature": 1.0, "seed": 4},
    {"min_tokens": 6, "end_ids": (END, 11), "logit_bias": {11: 7.0}, "temperature": 1.0, "seed": 8},
]  # fmt: skip


def corrupted(rng: random.Random, tokens: list[int], rate: float) -> list[int]:
    """The tokens of an answer, of which some are replaced, repeated or left out."""
    return [rng.randrange(300) if rng.random() < rate else token for token in tokens for _ in range(rng.choice((1, 1, 1, 1, 1, 0, 2)))]


class LogProb(float):
    """Equal to those of other batches: on some processors, a row's sums are in an order that depends on its batch."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, abs_tol=1e-3)

    __hash__ = None  # type: ignore[assignment]


def comparable(answer: Answer) -> tuple[Any, ...]:
    error = answer.error.code if answer.error is not None else None
    logprobs = [(entry.token_id, LogProb(entry.logprob), [token for token, _ in entry.top]) for entry in answer.logprobs]
    return answer.tokens, answer.reason, answer.stop_id, error, logprobs, answer.prompt_logprobs is None


@pytest.mark.parametrize("settings", [{"draft_tokens": 3}, {"draft_tokens": 7, "max_num_tokens": 24, "policy": "max_utilization"}])
def test_features(drive: Make, prompts: list[list[int]], settings: dict[str, Any]) -> None:
    """Rows with 1 + k tokens, plain rows and prefill chunks share batches. The drafts of a request are its answer with errors."""
    rng = random.Random(1)
    cases = [request(prompts[i % len(prompts)], **{"max_tokens": COUNT} | params) for i, params in enumerate(FEATURES)]
    plain = drive()
    expected = plain.run(*cases)
    again: list[TokenRequest] = []
    for case in cases:
        call = request(case.prompt_ids, end_ids=case.end_ids)
        call.params = case.params
        call.draft_ids = corrupted(rng, plain.answers[case.request_id, 0].tokens, 0.1)
        again.append(call)
    driven = drive(speculate="request", adaptive_drafts=False, kv_cache_tokens=24 * 16, **settings)
    found = driven.run(*again)
    for case, one, other in zip([c for c in cases for _ in range(c.params.n)], expected, found, strict=True):
        assert comparable(one) == comparable(other), case.params
    assert driven.stats.num_steps < 0.8 * plain.stats.num_steps or "policy" in settings


@pytest.mark.parametrize("speculate", ["ngram", "request"])
def test_prompt_lookup(drive: Make, prompts: list[list[int]], speculate: str) -> None:
    """A request that biases the model to repeat itself needs fewer steps."""
    calls = [request(prompt, max_tokens=40, logit_bias=dict.fromkeys((5, 6, 7), 4.0), frequency_penalty=-0.1) for prompt in prompts]
    plain = drive()
    expected = [answer.tokens for answer in plain.run(*calls)]
    driven = drive(speculate=speculate, adaptive_drafts=False)
    assert [answer.tokens for answer in driven.run(*calls)] == expected
    assert (driven.stats.num_steps < 0.6 * plain.stats.num_steps) is (speculate == "ngram")


def test_logits_of_drafts(drive: Make, prompts: list[list[int]], model: Any) -> None:
    """Drafts that transformers samples from the same distribution are accepted, because their logits are those of the model."""
    generator, calls = torch.Generator().manual_seed(4), []
    for prompt in prompts:
        call = request(prompt, max_tokens=8, temperature=1.0, seed=3)
        calls.append(call)
        call.draft_ids = [answer.tokens[0] for answer in drive().run(request(prompt, max_tokens=1, temperature=1.0, seed=3))]
        rows = [logits_of(model, prompt)[-1]]
        for _ in range(6):
            rows.append(logits_of(model, [*prompt, *call.draft_ids])[-1])
            call.draft_ids.append(int(torch.multinomial(torch.softmax(rows[-1], 0), 1, generator=generator)))
        call.draft_logits = torch.stack(rows).float().numpy().tobytes()
    driven = drive(speculate="request", adaptive_drafts=False)
    for call, answer in zip(calls, driven.run(*calls), strict=True):
        assert answer.tokens[:7] == call.draft_ids
    assert driven.stats.num_accepted_draft_tokens == driven.stats.num_draft_tokens == 6 * len(calls)


class StubDrafter(Drafter):
    """Drafts on the device: the true answers, except where a draft is a multiple of seven."""

    num_drafts = 4

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.num_accepted = 0

    def compute(self, inputs: DraftInputs) -> Tensor:
        self.num_accepted += 0 if inputs.verified is None else int(inputs.verified.num_accepted.sum())
        return torch.tensor([self.drafts_after(token) for token in inputs.newest.tolist()], dtype=torch.int32)

    def drafts(self, inputs: DraftInputs, computed: Tensor) -> Iterator[Tensor]:
        yield from computed.unbind(1)

    def drafts_after(self, newest: int) -> list[int]:
        """What follows the first occurrence of the token in the answers."""
        found = next((answer[at + 1 :] for answer in self.answers.values() for at in [find(answer, newest)] if at >= 0), [])
        return [token if token % 7 else token + 1 for token in [*found, 1, 1, 1, 1]][: self.num_drafts]


def find(answer: list[int], token: int) -> int:
    return answer.index(token) if token in answer else -1


class StubDeviceDrafts(Proposer):
    max_drafts = StubDrafter.num_drafts
    reads_token_ids = False
    runs_on_device = True

    def propose(self, seq: Sequence, limit: int) -> list[int]:
        return [-1] * limit


def test_drafts_of_the_device(drive: Make, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that only the device knows are verified. Sequences whose features read tokens on the host have no drafts."""
    cases = [
        request(prompts[i % len(prompts)], **{"max_tokens": COUNT} | params)
        for i, params in enumerate(FEATURES[:2] + FEATURES[4:6] + FEATURES[8:10])
    ]
    plain = drive()
    expected = [comparable(answer) for answer in plain.run(*cases)]
    drafter = StubDrafter({tuple(case.prompt_ids): plain.answers[case.request_id, 0].tokens for case in cases})
    monkeypatch.setitem(PROPOSERS._rows, "ngram", StubDeviceDrafts)
    driven = drive(speculate="ngram", adaptive_drafts=False)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner)
    runner.last_ids = torch.zeros((1 + drafter.num_drafts) * (runner.inputs.num_rows + 1), dtype=torch.int32)
    runner.draft_runner = DraftRunner(drafter, runner.sampler.table, runner.last_ids, runner.inputs)
    assert [comparable(answer) for answer in driven.run(*cases)] == expected
    assert drafter.num_accepted > 20


def overlapped(driven: Driven, *, looks_up: bool) -> Driven:
    """The executor with two steps in flight, as on a GPU."""
    executor = driven.executor
    runner = executor.runner
    assert isinstance(runner, ModelRunner)
    runner.tracker = RowTracker(runner.inputs.num_rows, 192, runner.inputs.block_size, torch.device("cpu"), looks_up=looks_up)
    executor._depth = 2
    return driven


def count_drafts_ahead(driven: Driven) -> Callable[[], int]:
    """Returns a function that returns the number of rows that verified drafts after ids which the host did not know."""
    runner, count = driven.executor.runner, 0
    launch = runner.launch

    def counted(plan: Any) -> Any:
        nonlocal count
        count += sum(bool(drafts) and drafts[0] < 0 for drafts in plan.drafts)
        return launch(plan)

    runner.launch = counted  # type: ignore[method-assign]
    return lambda: count


@pytest.mark.parametrize("settings", [{"draft_tokens": 3}, {"draft_tokens": 7, "max_num_tokens": 24, "policy": "max_utilization"}])
def test_drafts_that_are_planned_before_ids_are_known(drive: Make, prompts: list[list[int]], settings: dict[str, Any]) -> None:
    """Prompt lookup on the device, beside prefills and with preemption: greedy, sampled, with log-probabilities, and with the features that
    read no tokens on the host. Some answers end within drafts. With a feature that reads tokens on the host, all steps wait."""
    bodies: list[dict[str, Any]] = [
        {},
        {"temperature": 0.2, "seed": 5, "n": 2},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"end_ids": (77, 5, 11)},
        {"repetition_penalty": 1.1, "frequency_penalty": -0.3, "presence_penalty": 0.2, "temperature": 0.3, "seed": 8},
        {"logit_bias": {5: 3.0, 77: 2.0}, "repetition_penalty": 1.2, "logprobs": 1},
        {"allowed_token_ids": (5, 40, 41, 77, 200), "frequency_penalty": 0.1},
    ]
    texts = [(prompts[i % len(prompts)][:8] * 4)[: 8 * i + 20] for i in range(len(bodies))]
    calls = [request(text, **{"max_tokens": 60} | body) for text, body in zip(texts, bodies, strict=True)]
    plain = drive()
    expected = [comparable(answer) for answer in plain.run(*calls)]
    driven = overlapped(drive(speculate="ngram", adaptive_drafts=False, kv_cache_tokens=24 * 16, **settings), looks_up=True)
    num_ahead = count_drafts_ahead(driven)
    assert [comparable(answer) for answer in driven.run(*calls)] == expected
    assert num_ahead() > 40 and driven.stats.num_accepted_draft_tokens > 40
    assert (driven.stats.num_preemptions > 0) is ("policy" in settings)
    num_before = num_ahead()
    for feature in ({"min_tokens": 5}, {"bad_words": ((5, 40), (77,))}):
        cases = [request(prompts[0], max_tokens=40, **feature), request(prompts[1], max_tokens=10)]
        assert [a.tokens for a in driven.run(*cases)] == [a.tokens for a in drive().run(*cases)]
        assert num_ahead() == num_before


def test_drafts_of_a_drafter_that_are_planned_before_ids_are_known(drive: Make, prompts: list[list[int]]) -> None:
    calls = [request(prompt, max_tokens=COUNT + i, temperature=0.8 * (i % 2), seed=3) for i, prompt in enumerate(prompts)]
    plain = drive()
    expected = [comparable(answer) for answer in plain.run(*calls)]
    drafter = StubDrafter({tuple(call.prompt_ids): plain.answers[call.request_id, 0].tokens for call in calls})
    driven = drive(speculate="ngram", draft_tokens=drafter.num_drafts, adaptive_drafts=False)
    runner, scheduler = driven.executor.runner, driven.executor.scheduler
    assert isinstance(runner, ModelRunner) and isinstance(scheduler, Scheduler)
    scheduler._proposer = scheduler._planner._proposer = DrafterTokens()
    runner.last_ids = torch.zeros((1 + drafter.num_drafts) * (runner.inputs.num_rows + 1), dtype=torch.int32)
    runner.draft_runner = DraftRunner(drafter, runner.sampler.table, runner.last_ids, runner.inputs)
    num_ahead = count_drafts_ahead(overlapped(driven, looks_up=False))
    assert [comparable(answer) for answer in driven.run(*calls)] == expected
    assert num_ahead() > 20 and drafter.num_accepted > 20
