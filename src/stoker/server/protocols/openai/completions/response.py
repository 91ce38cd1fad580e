"""Responses of POST /v1/completions."""

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
from stoker.server.protocols.common.ranking import mean_logprob
from stoker.server.protocols.common.streams import merge_streams
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.chunks import DONE, Chunks, event
from stoker.server.protocols.openai.completions.request import CompletionCall, read_completion_call
from stoker.server.threads import LONG_TOKENS, compute


async def complete(http: RequestContext, context: Context, service: Service, body: dict[str, Any]) -> None:
    """Check a request, generate, and respond, whole or streamed. Raises RequestError before the first byte."""
    async with http.cancel_on_disconnect():
        call = await read_completion_call(body, service, context)
        if call.common.stream:
            await _Stream(http, call).run()
        else:
            await http.respond(200, await _whole(call))


async def _whole(call: CompletionCall) -> bytes:
    """Generate for all prompts. The encoded response."""
    completions = await gather([_complete(call, index) for index in range(len(call.requests))])
    scored = call.common.params.prompt_logprobs is not None
    num_scored = sum(len(completion.prompt_token_ids) for completion in completions) if scored else 0
    return await compute(_body, call, completions, long=num_scored > LONG_TOKENS)


def _body(call: CompletionCall, completions: list[Completion]) -> bytes:
    """The encoded response."""
    choices = [choice for prompt_index, completion in enumerate(completions) for choice in _choices(call, prompt_index, completion)]
    usage = wire.add_usage(completion.usage for completion in completions)
    if call.score_only:
        usage.completion_tokens = 0
    return wire.encode({**call.head, "choices": choices, "usage": wire.usage_object(usage)})


async def _complete(call: CompletionCall, index: int) -> Completion:
    """Generate for one prompt. An error names the prompt to which it belongs."""
    try:
        return await call.service.complete(call.requests[index])
    except StokerError as error:
        raise call.rename(error, index) from None


def _choices(call: CompletionCall, prompt_index: int, completion: Completion) -> list[dict[str, Any]]:
    """The choices of one prompt; with best_of, the best n of them. Raises the error of a failed sequence."""
    for choice in completion.choices:
        if choice.finish_reason is FinishReason.ERROR:
            raise sequence_error(choice.error, ready=call.service.ready)
    best = completion.choices
    if len(best) > call.num_choices:
        best = sorted(best, key=mean_logprob, reverse=True)[: call.num_choices]
    return [_choice(call, prompt_index, i, choice, completion.prompt_logprobs) for i, choice in enumerate(best)]


def _choice(
    call: CompletionCall, prompt_index: int, index: int, choice: Choice, prompt_logprobs: list[TokenLogprobs | None] | None
) -> dict[str, Any]:
    """OpenAI's object of a whole choice. `index` counts the choices of the prompt."""
    builder = _ChoiceBuilder(call, prompt_index)
    delta = Delta(choice.index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason)
    result = builder.choice(prompt_index * call.num_choices + index, delta, prompt_logprobs)
    if call.common.prompt_logprobs:
        result["prompt_logprobs"] = wire.prompt_logprobs(call.service, prompt_logprobs) if prompt_logprobs is not None else None
    return result


class _ChoiceBuilder:
    """Builds the objects of one choice: one for a whole response, one per chunk of a stream. The first contains the echo."""

    def __init__(self, call: CompletionCall, prompt_index: int) -> None:
        self._call = call
        self._prompt_index = prompt_index
        self._logprobs = wire.CompletionLogprobs(call.service, call.echoes[prompt_index])
        self.started = False

    def choice(self, index: int, delta: Delta, prompt_logprobs: list[TokenLogprobs | None] | None) -> dict[str, Any]:
        """The object for new text. `index` numbers the choices of all prompts."""
        call, with_answer = self._call, not self._call.score_only
        text = delta.text if with_answer and call.common.detokenize else ""
        logprobs: list[TokenLogprobs | None] = [*delta.logprobs] if with_answer else []
        if not self.started:
            text = call.echoes[self._prompt_index] + text
            logprobs = [*((prompt_logprobs or []) if call.echoes[self._prompt_index] else []), *logprobs]
        ids = self._token_ids(delta) if call.common.token_ids else {}
        self.started = True
        reason = delta.finish_reason
        finish = None if reason is None else wire.FINISH[reason] if with_answer else "length"
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs.object(logprobs, self._first_id()) if call.logprobs else None,
            "finish_reason": finish,
            "stop_reason": wire.stop_reason(reason, delta.stop_reason) if reason is not None and with_answer else None,
            **ids,
        }

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        """vLLM's members: the new ids, and those of the prompt in the first object."""
        ids: dict[str, Any] = {"token_ids": [] if self._call.score_only else delta.token_ids}
        if not self.started:
            ids["prompt_token_ids"] = self._call.requests[self._prompt_index].prompt
        return ids

    def _first_id(self) -> int:
        """The first token of the prompt. 0 if the prompt is text."""
        prompt = self._call.requests[self._prompt_index].prompt
        return prompt[0] if isinstance(prompt, list) and prompt else 0


class _Stream:
    """A streamed response. The deltas that arrive together are written with a single `send`."""

    def __init__(self, http: RequestContext, call: CompletionCall) -> None:
        self._http = http
        self._call = call
        self._options = call.common.options
        self._chunks = Chunks(call.head, chat=False, include_usage=self._options.include_usage)
        self._plain = not (
            call.logprobs or call.score_only or call.common.token_ids or not call.common.detokenize or self._options.continuous_usage_stats
        )
        self._builders = [
            [_ChoiceBuilder(call, prompt_index) for _ in range(call.num_choices)] for prompt_index in range(len(call.requests))
        ]
        self._usages = [Usage() for _ in call.requests]
        self._prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * len(call.requests)

    async def run(self) -> None:
        """Generate for all prompts and send chunks as deltas arrive. An error after the first chunk becomes an event."""
        try:
            await self._send_deltas()
        except StokerError as error:  # one prompt is refused after the stream of another has started
            if not self._http.started:
                raise
            await self._http.send(event({"error": wire.failure_object(describe(error))}))
        if self._options.include_usage:
            await self._http.send(self._chunks.usage(self._total()))
        await self._http.send(DONE)
        await self._http.close_stream()

    async def _send_deltas(self) -> None:
        """Send a chunk for each delta. The deltas that arrive together are written at once."""
        async with aclosing(merge_streams(self._call.service, self._call.requests, self._call.rename)) as batches:
            async for prompt_index, deltas in batches:
                if not self._http.started:
                    await self._http.open_stream()
                num_scored = sum(len(delta.prompt_logprobs or ()) for delta in deltas)
                if data := await compute(self._encode, prompt_index, deltas, long=num_scored > LONG_TOKENS):
                    await self._http.send(data)

    def _encode(self, prompt_index: int, deltas: list[Delta]) -> bytes:
        """The events for the deltas of one prompt."""
        return b"".join([self._chunk(prompt_index, delta) for delta in deltas])

    def _chunk(self, prompt_index: int, delta: Delta) -> bytes:
        """The event for one delta. Empty if there is nothing to send."""
        builder = self._builders[prompt_index][delta.index]
        index = prompt_index * self._call.num_choices + delta.index
        if self._plain and builder.started and delta.finish_reason is None:
            return self._chunks.text(index, delta.text) if delta.text else b""
        self._update_usage(prompt_index, delta)
        if delta.finish_reason is FinishReason.ERROR:
            failure = describe(sequence_error(delta.error, ready=self._call.service.ready))
            return event({"error": wire.failure_object(failure)})
        choice = builder.choice(index, delta, self._prompt_logprobs[prompt_index])
        return self._chunks.choice(choice, self._total() if self._options.continuous_usage_stats else None)

    def _update_usage(self, prompt_index: int, delta: Delta) -> None:
        """Add a delta to the usage of its prompt, and keep the log-probabilities of the prompt."""
        wire.update_usage(self._usages[prompt_index], delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = delta.prompt_logprobs
        if self._call.score_only:
            self._usages[prompt_index].completion_tokens = 0

    def _total(self) -> Usage:
        """The usage of all prompts."""
        return wire.add_usage(self._usages)
