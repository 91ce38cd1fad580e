"""Responses of POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.base.types import Delta, FinishReason, TokenLogprobs, Usage
from stoker.frontend.service import Choice, Completion, Service
from stoker.server.errors import describe, sequence_error
from stoker.server.http.request_context import RequestContext
from stoker.server.protocol import Context
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.chat.message import delta_object, message_object
from stoker.server.protocols.openai.chat.request import ChatCall, read_chat_call
from stoker.server.protocols.openai.chunks import DONE, Chunks, event
from stoker.server.threads import LONG_TOKENS, compute


async def chat(http: RequestContext, context: Context, service: Service, body: dict[str, Any]) -> None:
    """Check a request, generate, and respond, whole or streamed. Raises RequestError before the first byte."""
    async with http.cancel_on_disconnect():
        call = await read_chat_call(body, service, context.settings)
        if call.common.stream:
            await _Stream(http, call).run()
        else:
            await http.respond(200, await _whole(call))


async def _whole(call: ChatCall) -> bytes:
    """Generate all choices. The encoded response."""
    completion = await call.service.complete(call.request)
    return await compute(_body, call, completion, long=call.common.prompt_logprobs and len(completion.prompt_token_ids) > LONG_TOKENS)


def _body(call: ChatCall, completion: Completion) -> bytes:
    """The encoded response."""
    body = {**call.head, "choices": [_choice(call, choice) for choice in completion.choices], "usage": wire.usage_object(completion.usage)}
    if call.common.prompt_logprobs:
        entries = completion.prompt_logprobs
        body["prompt_logprobs"] = wire.prompt_logprobs(call.service, entries) if entries is not None else None
    if call.common.token_ids:
        body["prompt_token_ids"] = call.request.prompt
    return wire.encode(body)


def _choice(call: ChatCall, choice: Choice) -> dict[str, Any]:
    """OpenAI's object of a choice: its text is parsed into message, reasoning and calls. Raises the error of a failed sequence."""
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=call.service.ready)
    parser = call.parser()
    parts = parser.push(choice.text if call.common.detokenize else "", last=True)
    parts.content = call.echo + parts.content
    return {
        **({"token_ids": choice.token_ids} if call.common.token_ids else {}),
        "index": choice.index,
        "message": message_object(parts, role=call.role, reasoning=call.settings.reasoning_parser is not None),
        "logprobs": None if call.num_top is None else wire.chat_logprobs(call.service, choice.logprobs, call.num_top),
        "finish_reason": call.finish_reason(choice.finish_reason, parser.num_calls),
        "stop_reason": wire.stop_reason(choice.finish_reason, choice.stop_reason),
    }


class _Stream:
    """A streamed response. The deltas that arrive together are written with a single `send`."""

    def __init__(self, http: RequestContext, call: ChatCall) -> None:
        self._http = http
        self._call = call
        self._options = call.common.options
        head = {**call.head, "object": "chat.completion.chunk"}
        self._chunks = Chunks(head, chat=True, include_usage=self._options.include_usage)
        self._plain = call.common.detokenize and not (
            call.parsed or call.num_top is not None or self._options.continuous_usage_stats or call.common.token_ids
        )
        self._parsers = [call.parser() for _ in range(call.request.params.n)]
        self._scores: list[list[TokenLogprobs]] = [
            [] for _ in self._parsers
        ]  # log-probabilities of tokens whose text the parser holds back
        self._usage = Usage()

    async def run(self) -> None:
        """Generate, and send chunks as deltas arrive. The failure of a sequence becomes an event."""
        async with aclosing(self._call.service.stream(self._call.request)) as batches:
            async for deltas in batches:
                data = b"".join([self._chunk(delta) for delta in deltas])
                if not self._http.started:
                    data = b"".join([self._role_chunk(i) for i in range(len(self._parsers))]) + data
                    await self._http.open_stream()
                if data:
                    await self._http.send(data)
        if self._options.include_usage:
            await self._http.send(self._chunks.usage(self._usage))
        await self._http.send(DONE)
        await self._http.close_stream()

    def _chunk(self, delta: Delta) -> bytes:
        """The event for one delta. Empty if there is nothing to send."""
        if self._plain and delta.finish_reason is None and delta.usage is None:
            return self._chunks.text(delta.index, delta.text) if delta.text else b""
        wire.update_usage(self._usage, delta)
        if delta.finish_reason is FinishReason.ERROR:
            failure = describe(sequence_error(delta.error, ready=self._call.service.ready))
            return event({"error": wire.failure_object(failure)})
        return self._parsed_chunk(delta)

    def _parsed_chunk(self, delta: Delta) -> bytes:
        """A chunk with the parts that the parser returns; empty while it holds all text back."""
        parser, scores = self._parsers[delta.index], self._scores[delta.index]
        scores += delta.logprobs
        parts = parser.push(delta.text if self._call.common.detokenize else "", last=delta.finish_reason is not None)
        always = self._options.continuous_usage_stats or (self._call.common.token_ids and delta.token_ids)
        if not parts and delta.finish_reason is None and not always:
            return b""
        logprobs = None
        if self._call.num_top is not None and (parts or delta.finish_reason is not None):
            logprobs = wire.chat_logprobs(self._call.service, scores, self._call.num_top)
            scores.clear()
        return self._choice(delta, delta_object(parts), logprobs)

    def _choice(self, delta: Delta, new: dict[str, Any], logprobs: dict[str, Any] | None) -> bytes:
        """The chunk for a delta. `new`: its member `delta`."""
        reason = delta.finish_reason
        choice: dict[str, Any] = {"index": delta.index, "delta": new, "logprobs": logprobs, "finish_reason": None}
        if self._call.common.token_ids:
            choice["token_ids"] = delta.token_ids
        if reason is not None:
            choice["finish_reason"] = self._call.finish_reason(reason, self._parsers[delta.index].num_calls)
            choice["stop_reason"] = wire.stop_reason(reason, delta.stop_reason)
        return self._chunks.choice(choice, self._usage if self._options.continuous_usage_stats else None)

    def _role_chunk(self, index: int) -> bytes:
        """The first chunk of a choice, which contains its role and the echo; that of the first choice also has the prompt's token ids."""
        delta = {"role": self._call.role, "content": self._call.echo}
        role = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        prompt_ids = self._call.request.prompt if self._call.common.token_ids and index == 0 else None
        usage = Usage(self._usage.prompt_tokens) if self._options.continuous_usage_stats else None
        return self._chunks.choice(role, usage, prompt_ids)
