"""Beam search with an executor that does not support beams: in each step, every beam is one request for one token.

The prefix index supplies the KV cache of the prompt and of the common beginnings of beams. `BeamSearch` follows transformers'
`GenerationMixin._beam_search` for one prompt without sampling: the same candidates, scores and end conditions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import MAX_LOGPROBS, FinishReason, SamplingParams, TokenLogprobs, Usage
from stoker.frontend.executor_errors import to_error
from stoker.frontend.sequence_text import SequenceText
from stoker.frontend.service import Choice, Completion
from stoker.frontend.stopwatch import Stopwatch
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import ExecutorClient
from stoker.runtime.request import ErrorInfo, SequenceOutput, TokenRequest


class Beam(msgspec.Struct):
    """A hypothesis: token ids and a score.

    `score` is the sum of the log-probabilities of `ids`; for a finished beam it is divided by length ** length_penalty.
    """

    ids: list[int]
    score: float
    logprobs: list[TokenLogprobs]


class BeamSearch:
    """The algorithm, without a model or a clock. Call `step` with the continuations of each beam in `running` until `done`.

    `stops(ids)` is true when the text of these tokens contains a stop string.
    """

    def __init__(self, params: SamplingParams, end_ids: frozenset[int], stops: Callable[[list[int]], bool] = lambda ids: False) -> None:
        self._params = params
        self._end_ids = end_ids
        self._stops = stops
        self._width = params.beam_width
        self._improvable = True
        self.running = [Beam([], 0.0, [])]
        self.finished: list[Beam] = []  # best first
        self.done = False

    @property
    def num_candidates(self) -> int:
        """The number of continuations that `step` needs for each beam."""
        return min(MAX_LOGPROBS, max(2, 1 + len(self._end_ids)) * self._width)

    def step(self, continuations: list[list[tuple[int, float]]]) -> None:
        """Advance all beams by one token.

        continuations[i] are the (token id, log-probability) pairs after running[i], most likely first.
        """
        best = self._best_candidates(continuations)
        ends = [self._ends(beam.ids) for beam in best]
        self.running = [beam for beam, ended in zip(best, ends, strict=True) if not ended][: self._width]
        # Candidates beyond the width only replace candidates that end; they never count as finished.
        self._finish([beam for beam, ended in zip(best[: self._width], ends, strict=False) if ended])
        full = len(self.finished) == self._width
        self._improvable &= not full or (bool(self.running) and self._penalized(self.running[0]) > self.finished[-1].score)
        self.done = not self.running or not self._improvable or (full and self._params.early_stopping)

    def _best_candidates(self, continuations: list[list[tuple[int, float]]]) -> list[Beam]:
        """The best extensions of all running beams, best first: enough that `beam_width` of them do not end."""
        banned = self._end_ids if len(self.running[0].ids) < self._params.min_tokens else frozenset()
        scored = [
            (beam.score + logprob, i, token, logprob)
            for i, (beam, followers) in enumerate(zip(self.running, continuations, strict=True))
            for token, logprob in followers
            if token not in banned
        ]
        scored.sort(key=lambda candidate: candidate[0], reverse=True)
        best = scored[: max(2, 1 + len(self._end_ids)) * self._width]
        return [self._extended(self.running[i], token, logprob, continuations[i]) for _, i, token, logprob in best]

    def _extended(self, beam: Beam, token: int, logprob: float, followers: list[tuple[int, float]]) -> Beam:
        """`beam` extended by one token."""
        num_logprobs = self._params.logprobs
        logprobs = [] if num_logprobs is None else [*beam.logprobs, TokenLogprobs(token, logprob, followers[:num_logprobs])]
        return Beam([*beam.ids, token], beam.score + logprob, logprobs)

    def _ends(self, ids: list[int]) -> bool:
        """Whether a beam with these ids has ended."""
        return ids[-1] in self._end_ids or len(ids) >= self._params.max_tokens or self._stops(ids)

    def _finish(self, beams: list[Beam]) -> None:
        """Add beams to the finished ones, of which the best `beam_width` are retained."""
        if self._improvable and not (self._params.early_stopping and len(self.finished) == self._width):
            self.finished += [Beam(beam.ids, self._penalized(beam), beam.logprobs) for beam in beams]
            self.finished.sort(key=lambda beam: beam.score, reverse=True)
            del self.finished[self._width :]

    def _penalized(self, beam: Beam) -> float:
        """The score of a finished beam."""
        return float(beam.score / len(beam.ids) ** self._params.length_penalty)


class BeamDriver:
    """Runs the beam search of one request on an executor."""

    def __init__(self, task: TokenRequest, client: ExecutorClient, tokenizer: Tokenizer, stopwatch: Stopwatch) -> None:
        self._task = task
        self._client = client
        self._tokenizer = tokenizer
        self._stopwatch = stopwatch
        self._deadline = None if task.timeout_s is None else time.monotonic() + task.timeout_s
        self._end_ids = frozenset(task.end_ids) | frozenset(task.params.stop_token_ids)
        self._search = BeamSearch(task.params, self._end_ids, self._stops if task.params.stop else lambda ids: False)
        self._first: SequenceOutput | None = None
        self._ended: FinishReason | None = None  # CANCELLED or DEADLINE, once set

    def cancel(self) -> None:
        """End the search after the current step. `run` then returns the beams found so far."""
        self._ended = FinishReason.CANCELLED

    async def run(self) -> Completion:
        """Search until the end conditions hold. Returns the `n` best of `beam_width` beams, best first; both are sampling parameters.

        Raises the errors that the executor reports. The requests of one step run concurrently.
        """
        num_steps = 0
        while not self._search.done and self._ended is None:
            try:
                async with asyncio.TaskGroup() as group:
                    steps = [group.create_task(self._continue(beam, f"{num_steps}.{i}")) for i, beam in enumerate(self._search.running)]
            except ExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            outputs = [step.result() for step in steps]
            self._check(outputs)
            if self._ended is None:
                self._search.step([output.logprobs[0].top for output in outputs])
            num_steps += 1
        return self._completion()

    async def _continue(self, beam: Beam, suffix: str) -> SequenceOutput:
        """Request one token after a beam, with the log-probabilities of the candidates. Returns the last output."""
        prompt_logprobs = self._task.params.prompt_logprobs if not beam.ids else None
        params = SamplingParams(max_tokens=1, logprobs=self._search.num_candidates, prompt_logprobs=prompt_logprobs)
        request = TokenRequest(
            request_id=f"{self._task.request_id}/{suffix}",
            prompt_ids=self._task.prompt_ids + beam.ids,
            params=params,
            priority=self._task.priority,
            timeout_s=None if self._deadline is None else max(0.0, self._deadline - time.monotonic()),
            cache_salt=self._task.cache_salt,
        )
        async with aclosing(self._client.generate(request)) as batches:
            return [output async for outputs in batches for output in outputs][-1]

    def _check(self, outputs: list[SequenceOutput]) -> None:
        """Record the first output and its time. Raises errors, and ends the search if a request was cancelled or timed out."""
        self._first = self._first or outputs[0]
        self._stopwatch.token(outputs[0].admission)
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise to_error(output.error or ErrorInfo("internal_error", "a beam failed"))
            if output.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
                self._ended = self._ended or output.finish_reason

    def _completion(self) -> Completion:
        """The completion with the best beams found so far."""
        beams = self._search.finished if self._ended is None else self._search.finished + self._search.running
        choices = [self._choice(i, beam) for i, beam in enumerate(beams[: self._task.params.n])]
        usage = Usage(len(self._task.prompt_ids), sum(len(c.token_ids) for c in choices), self._first.cached_tokens if self._first else 0)
        timings = self._stopwatch.timings([len(choice.token_ids) for choice in choices])
        prompt_logprobs = self._first.prompt_logprobs if self._first else None
        return Completion(self._task.request_id, self._task.prompt_ids, choices, usage, prompt_logprobs, timings)

    def _choice(self, index: int, beam: Beam) -> Choice:
        """The choice with the text of one beam."""
        ended_by_id = bool(beam.ids) and beam.ids[-1] in self._end_ids
        reason = FinishReason.STOP if ended_by_id else self._ended or FinishReason.LENGTH
        stop_id = beam.ids[-1] if ended_by_id else None
        output = SequenceOutput(self._task.request_id, index, beam.ids, reason, stop_id, beam.logprobs)
        delta = self._text(index).push(output)
        assert delta.finish_reason is not None
        admission = self._first.admission if self._first else None
        return Choice(index, delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason, delta.logprobs, admission=admission)

    def _stops(self, ids: list[int]) -> bool:
        """Whether the text of these tokens contains a stop string."""
        text = self._text(0)
        text.push(SequenceOutput(self._task.request_id, 0, ids))
        return text.stopped_by_text

    def _text(self, index: int) -> SequenceText:
        """A new converter of tokens to text for one beam."""
        return SequenceText(index, self._task.params, self._tokenizer.detokenizer(self._task.params.skip_special_tokens))


def check_beams(params: SamplingParams, end_ids: tuple[int, ...]) -> None:
    """Raise RequestError for sampling parameters that beam search does not support."""
    if params.n > params.beam_width:
        raise RequestError("n", params.n, f"it must be at most beam_width={params.beam_width}", cure="Raise beam_width.")
    num_ends = len({*end_ids, *params.stop_token_ids})
    if params.beam_width > MAX_LOGPROBS // 2 or params.beam_width + num_ends > MAX_LOGPROBS:
        limit = (
            f"it must be at most {MAX_LOGPROBS // 2}, and with the end ids ({num_ends}) at most {MAX_LOGPROBS}, the number of ranked tokens"
        )
        raise RequestError("beam_width", params.beam_width, limit, cure="Request fewer beams.")
    if not params.greedy:
        raise RequestError("temperature", params.temperature, "beam search does not sample", cure="Set temperature=0, or beam_width=1.")
    if changed := params.changes_logits:
        name = changed[0]
        raise RequestError(
            name, getattr(params, name), "beam search uses the probabilities of the model unchanged", cure=f"Leave {name} out."
        )
