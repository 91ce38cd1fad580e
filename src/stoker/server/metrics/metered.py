"""Wrappers that count: requests at the generation service, and token latencies at the executor's client."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from stoker.base import metrics
from stoker.base.errors import QueueFullError, RequestError, UnavailableError
from stoker.base.profile_query import ProfileResult
from stoker.base.types import Delta, FinishReason, GenerationRequest, PrefillChunk, Timings, Usage
from stoker.frontend.service import Completion, Service
from stoker.runtime.client import ExecutorClient, ExecutorInfo, TokenLatencies
from stoker.runtime.live_state import LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest
from stoker.runtime.transport.streams import StreamingClient
from stoker.server.errors import RateLimitError
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.telemetry.record import CURRENT, Generation, RequestRecord
from stoker.server.tenants.tenants import Account, open_account

# Phase of `Timings.phases`: the histogram of its duration.
PHASES = {
    "queue": metrics.QUEUE_TIME,
    "prefill": metrics.PREFILL_TIME,
    "decode": metrics.DECODE_TIME,
    "compute": metrics.COMPUTE_TIME,
}


class MeteredService(Service):
    """Counts the requests of a service by outcome, duration and size. A request's outcome is that of its first sequence."""

    def __init__(self, inner: Service, counts: FrontendMetrics) -> None:
        self.inner = inner
        self.model_name, self.end_ids, self.pad_id = inner.model_name, inner.end_ids, inner.pad_id
        self.chat_template = inner.chat_template
        self._counts = counts
        self._duration = counts.of(metrics.REQUEST_DURATION, self.model_name)
        self._time_per_token = counts.of(metrics.TIME_PER_OUTPUT_TOKEN, self.model_name)
        self._phases = {name: counts.of(metric, self.model_name) for name, metric in PHASES.items()}
        self._max_tokens = counts.of(metrics.MAX_TOKENS, self.model_name)
        self._prompt_length = counts.of(metrics.PROMPT_LENGTH, self.model_name)
        self._output_length = counts.of(metrics.OUTPUT_LENGTH, self.model_name)
        self._prompt_tokens = counts.of(metrics.PROMPT_TOKENS, self.model_name)
        self._output_tokens = counts.of(metrics.OUTPUT_TOKENS, self.model_name)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        with self._count_request(request) as outcome:
            async with aclosing(self.inner.stream(outcome.account.request)) as batches:
                async for deltas in batches:
                    for delta in deltas:
                        outcome.num_tokens += len(delta.token_ids)
                        if delta.usage is not None or delta.finish_reason is not None or outcome.texts is not None:
                            outcome.add(delta)
                    if outcome.num_finished == request.params.n and outcome.usage is not None:
                        await _settle_stream(outcome, deltas)
                    yield deltas

    async def complete(self, request: GenerationRequest) -> Completion:
        with self._count_request(request) as outcome:
            completion = await self.inner.complete(outcome.account.request)
            outcome.set(completion)
            await outcome.account.settle(completion.usage, outcome.name)
            return completion

    def cancel(self, request_id: str) -> None:
        self.inner.cancel(request_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.inner.token_bytes(token_id)

    async def render_chat(self, messages: list[dict[str, Any]], /, **template_values: Any) -> str:
        return await self.inner.render_chat(messages, **template_values)

    async def stats(self) -> ExecutorStats:
        return await self.inner.stats()

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        return await self.inner.profile(num_steps, time_s)

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        return await self.inner.live(detail=detail, first_step=first_step, log_after_s=log_after_s)

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    @property
    def max_seq_len(self) -> int:
        return self.inner.max_seq_len

    @property
    def ready(self) -> bool:
        return self.inner.ready

    @contextmanager
    def _count_request(self, request: GenerationRequest) -> Iterator[_Outcome]:
        """Count the request of the block with its duration when the block ends, and add it to the record of the client's request.

        Raises RateLimitError of the key with which it was sent.
        """
        record = CURRENT.get()
        outcome = _Outcome(Account(request, self.model_name), record)
        request.traced = record is not None and record.measured
        try:
            outcome.account = open_account(request, self.model_name)
            yield outcome
        except BaseException as error:
            outcome.failure = _outcome_of(error)
            raise
        finally:
            ended = time.monotonic()
            self._counts.of(metrics.REQUESTS, self.model_name, outcome.name).inc()
            self._duration.observe(ended - outcome.started)
            if (timings := outcome.timings) is not None:
                self._count_times(timings, request)
            used = outcome.used
            if used is not None:
                self._count_tokens(used.prompt_tokens, used.completion_tokens)
            outcome.account.close(used, outcome.name)
            if record is not None:
                record.generations.append(outcome.generation(self.model_name, request, ended))

    def _count_times(self, timings: Timings, request: GenerationRequest) -> None:
        """Count the durations of one request that ended by itself."""
        seconds = timings.phases()
        for name, histogram in self._phases.items():
            histogram.observe(seconds[name])
        if timings.time_per_output_token_s:
            self._time_per_token.observe(timings.time_per_output_token_s)
        self._max_tokens.observe(request.params.max_tokens)

    def _count_tokens(self, num_prompt: int, num_output: int) -> None:
        """Count the prompt and output tokens of one ended request."""
        self._prompt_tokens.inc(num_prompt)
        self._output_tokens.inc(num_output)
        self._prompt_length.observe(num_prompt)
        self._output_length.observe(num_output)


class MeteredClient(ExecutorClient):
    """Measures when tokens arrive from the executor. Each step of a beam search counts as a request here."""

    def __init__(self, inner: StreamingClient, model_name: str, counts: FrontendMetrics) -> None:
        self.inner = inner
        self._retried = counts.of(metrics.RETRIED_REQUESTS, model_name)
        inner.latencies = _Latencies(model_name, counts)

    def generate(self, request: TokenRequest) -> AsyncGenerator[list[SequenceOutput], None]:
        return self.inner.generate(request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.inner.cancel(request_id, index)

    async def stats(self) -> ExecutorStats:
        return await self.inner.stats()

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        return await self.inner.profile(num_steps, time_s)

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        return await self.inner.live(detail=detail, first_step=first_step, log_after_s=log_after_s)

    def pause(self, paused: bool) -> None:
        self.inner.pause(paused)

    def end_requests(self, error: UnavailableError) -> None:
        self.inner.end_requests(error)

    @property
    def info(self) -> ExecutorInfo:  # type: ignore[override]  # that of an executor that was started again
        return self.inner.info

    @property
    def alive(self) -> bool:
        return self.inner.alive

    async def recovery(self) -> None:
        """Wait for the executor, and count the request that then runs again."""
        await self.inner.recovery()
        self._retried.inc()

    async def close(self) -> None:
        await self.inner.close()


class _Latencies(TokenLatencies):
    """Adds the times of tokens to histograms."""

    def __init__(self, model_name: str, counts: FrontendMetrics) -> None:
        self._first = counts.of(metrics.TIME_TO_FIRST_TOKEN, model_name)
        self._between = counts.of(metrics.INTER_TOKEN_LATENCY, model_name)

    def add_first(self, seconds: float) -> None:
        self._first.observe(seconds)

    def add_next(self, seconds: float, count: int) -> None:
        self._between.observe(seconds, count)


class _Outcome:
    """What one request generated and how it ended, for counters and for the record of the client's request."""

    def __init__(self, account: Account, record: RequestRecord | None) -> None:
        self.account = account
        self._record = record
        self.started = time.monotonic()
        self.num_finished = 0  # sequences of a stream
        self.reason: FinishReason | None = None
        self.failure: str | None = None
        self.usage: Usage | None = None
        self.num_tokens = 0  # counted in a stream, because a cancelled one has no last delta with the usage
        self._first: float | None = None
        self.timings: Timings | None = None
        self._chunks: list[PrefillChunk] = []
        # By sequence; None: they are not retained.
        self.texts: dict[int, list[str]] | None = {} if record is not None and record.contents else None

    def add(self, delta: Delta) -> None:
        """Note the first delta of a stream, the last ones, and all of them if the contents are retained."""
        if self._first is None and delta.token_ids:
            self._first = time.monotonic()
            self._chunks = delta.prefill_chunks
        if self.texts is not None:
            self.texts.setdefault(delta.index, []).append(delta.text)
        if delta.finish_reason is not None:
            self.num_finished += 1
            self.reason = self.reason or delta.finish_reason
        if delta.usage is not None:
            self.usage = delta.usage
            self._set_timings(delta.timings)

    def set(self, completion: Completion) -> None:
        """Note the whole answer."""
        choice, self.usage = completion.choices[0], completion.usage
        self._set_timings(completion.timings)
        self.reason, self._chunks = choice.finish_reason, choice.prefill_chunks
        if self.timings is not None and self.usage.completion_tokens:
            self._first = self.started + self.timings.time_to_first_token_s
        if self.texts is not None:
            self.texts = {choice.index: [choice.text] for choice in completion.choices}

    def _set_timings(self, timings: Timings | None) -> None:
        """Note the timings, before the part of the answer is sent that may contain them."""
        self.timings = timings
        if self._record is not None:
            self._record.timings = timings

    def generation(self, model: str, request: GenerationRequest, ended: float) -> Generation:
        """The generation of `request`, which ended at `ended`, for the record."""
        usage = self.used or Usage()
        generation = Generation(model, self.started, ended, usage, self.name, self._first, self.timings, request.params, self._chunks)
        if self.texts is not None:
            generation.prompt = request.prompt
            generation.texts = ["".join(texts) for _, texts in sorted(self.texts.items())]
        return generation

    @property
    def used(self) -> Usage | None:
        """The tokens so far. None if nothing was computed."""
        if (usage := self.usage) is None:
            return None
        return msgspec.structs.replace(usage, completion_tokens=max(usage.completion_tokens, self.num_tokens))

    @property
    def name(self) -> str:
        """The label of the outcome: a finish reason, or the label of an error (`_outcome_of`), or "cancelled"."""
        return self.reason or self.failure or FinishReason.CANCELLED


async def _settle_stream(outcome: _Outcome, deltas: list[Delta]) -> None:
    """Record a stream before its last deltas are sent. If that fails, they become errors."""
    assert outcome.usage is not None
    try:
        await outcome.account.settle(outcome.usage, outcome.name)
    except UnavailableError as error:
        for delta in deltas:
            if delta.finish_reason is not None:
                delta.finish_reason, delta.error = FinishReason.ERROR, str(error)


def _outcome_of(error: BaseException) -> str:
    """The label value of stoker_requests_total for an exception."""
    match error:
        case QueueFullError():
            return "queue_full"
        case RateLimitError():
            return "rate_limited"
        case RequestError():
            return "refused"
        case UnavailableError():
            return "unavailable"
        case Exception():
            return FinishReason.ERROR
    return FinishReason.CANCELLED
