"""POST /v1/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.base.errors import StokerError
from stoker.base.types import Delta, FinishReason, TokenLogprobs, Usage
from stoker.frontend.service import Choice, Completion, Service
from stoker.server.errors import describe, sequence_error
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context
from stoker.server.protocols.common.concurrency import gather
from stoker.server.protocols.common.streams import streams
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.chunks import DONE, Chunks, event
from stoker.server.protocols.openai.completions.request import CompletionCall, read_completion_call


async def complete(http: RequestContext, context: Context, service: Service, body: dict[str, Any]) -> None:
    """Answer one request, whole or streamed."""
    async with http.cancel_on_disconnect():
        call = await read_completion_call(body, service, context)
        if call.common.stream:
            await _Stream(http, call).run()
        else:
            await http.respond(200, await _whole(call))


async def _whole(call: CompletionCall) -> bytes:
    completions = await gather([call.service.complete(request) for request in call.requests])
    choices = [choice for number, completion in enumerate(completions) for choice in _choices(call, number, completion)]
    usage = wire.add_usage(completion.usage for completion in completions)
    if call.score_only:
        usage.completion_tokens = 0
    return wire.encode({**call.head, "choices": choices, "usage": wire.usage_object(usage)})


def _choices(call: CompletionCall, number: int, completion: Completion) -> list[dict[str, Any]]:
    for choice in completion.choices:
        if choice.finish_reason is FinishReason.ERROR:
            raise sequence_error(choice.error, ready=call.service.ready)
    best = completion.choices
    if len(best) > call.num_choices:
        best = sorted(best, key=_mean_logprob, reverse=True)[: call.num_choices]
    return [_choice(call, number, i, choice, completion.prompt_logprobs) for i, choice in enumerate(best)]


def _mean_logprob(choice: Choice) -> float:
    """OpenAI's measure of best: the log-probability per token."""
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


def _choice(
    call: CompletionCall, number: int, index: int, choice: Choice, prompt_logprobs: list[TokenLogprobs | None] | None
) -> dict[str, Any]:
    texts = _Texts(call, number)
    delta = Delta(choice.index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason)
    shaped = texts.choice(number * call.num_choices + index, delta, prompt_logprobs)
    if "prompt_logprobs" in call.common.values:
        shaped["prompt_logprobs"] = wire.prompt_logprobs(call.service, prompt_logprobs or [])
    return shaped


class _Texts:
    """One choice on its way out: its echo comes with its first piece."""

    def __init__(self, call: CompletionCall, number: int) -> None:
        self._call = call
        self._number = number
        self._logprobs = wire.LogprobTexts(call.service, call.echoes[number])
        self.begun = False

    def choice(self, index: int, delta: Delta, prompt_logprobs: list[TokenLogprobs | None] | None) -> dict[str, Any]:
        call, shows_answer = self._call, not self._call.score_only
        text = delta.text if shows_answer else ""
        logprobs: list[TokenLogprobs | None] = [*delta.logprobs] if shows_answer else []
        if not self.begun:
            text = call.echoes[self._number] + text
            logprobs = [*((prompt_logprobs or []) if call.echoes[self._number] else []), *logprobs]
        self.begun = True
        reason = delta.finish_reason
        finish = None if reason is None else wire.FINISH[reason] if shows_answer else "length"
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs.shape(logprobs, self._first_id()) if call.logprobs else None,
            "finish_reason": finish,
            "stop_reason": wire.stop_reason(reason, delta.stop_reason) if reason is not None and shows_answer else None,
        }

    def _first_id(self) -> int:
        prompt = self._call.requests[self._number].prompt
        return prompt[0] if isinstance(prompt, list) and prompt else 0


class _Stream:
    """One streamed answer. Everything that one wake-up brings leaves in one piece."""

    def __init__(self, http: RequestContext, call: CompletionCall) -> None:
        self._http = http
        self._call = call
        self._options = call.common.options
        self._chunks = Chunks(call.head, chat=False, include_usage=self._options.include_usage)
        self._plain = not (call.logprobs or call.score_only or self._options.continuous_usage_stats)
        self._texts = [[_Texts(call, number) for _ in range(call.num_choices)] for number in range(len(call.requests))]
        self._usages = [Usage() for _ in call.requests]
        self._prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * len(call.requests)

    async def run(self) -> None:
        try:
            await self._send_deltas()
        except StokerError as error:  # one of several prompts is refused after another one began
            if not self._http.started:
                raise
            await self._http.send(event({"error": wire.failure_object(describe(error))}))
        if self._options.include_usage:
            await self._http.send(self._chunks.usage(self._total()))
        await self._http.send(DONE)
        await self._http.close_stream()

    async def _send_deltas(self) -> None:
        async with aclosing(streams(self._call.service, self._call.requests)) as batches:
            async for number, deltas in batches:
                if not self._http.started:
                    await self._http.open_stream()
                if data := b"".join([self._chunk(number, delta) for delta in deltas]):
                    await self._http.send(data)

    def _chunk(self, number: int, delta: Delta) -> bytes:
        text = self._texts[number][delta.index]
        index = number * self._call.num_choices + delta.index
        if self._plain and text.begun and delta.finish_reason is None:
            return self._chunks.text(index, delta.text) if delta.text else b""
        self._note(number, delta)
        if delta.finish_reason is FinishReason.ERROR:
            failure = describe(sequence_error(delta.error, ready=self._call.service.ready))
            return event({"error": wire.failure_object(failure)})
        choice = text.choice(index, delta, self._prompt_logprobs[number])
        return self._chunks.choice(choice, self._total() if self._options.continuous_usage_stats else None)

    def _note(self, number: int, delta: Delta) -> None:
        wire.count(self._usages[number], delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[number] = delta.prompt_logprobs
        if self._call.score_only:
            self._usages[number].completion_tokens = 0

    def _total(self) -> Usage:
        return wire.add_usage(self._usages)
