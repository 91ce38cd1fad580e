"""Responses of :predict: streamed text, all text as one JSON string, or {"text": …}."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.types import FinishReason, GenerationRequest
from stoker.frontend.service import Service
from stoker.server.errors import sequence_error
from stoker.server.http.request_context import JSON, STREAMED, RequestContext
from stoker.server.protocols.truss.body import BINARY, is_binary
from stoker.server.protocols.truss.request import PredictCall


async def respond_predict(http: RequestContext, service: Service, call: PredictCall) -> None:
    """Generate and respond. Raises StokerError before the first byte of the response; a later error is written into the stream."""
    if not call.stream:
        await _respond(http, {"text": await _text(service, call)})
    elif _accepts_only_json(http):
        await _respond(http, await _text(service, call))
    elif call.request is None or call.request.params.beam_width > 1:
        await _stream_once(http, await _text(service, call))
    else:
        await _stream(http, service, call.request)


def _accepts_only_json(http: RequestContext) -> bool:
    """The Truss server's rule: a client whose Accept header is exactly JSON receives no stream, except OpenAI's clients."""
    accepts_json = http.headers.get(b"accept") == JSON
    return accepts_json and b"openai" not in http.headers.get(b"user-agent", b"").lower()


async def _respond(http: RequestContext, value: Any) -> None:
    """Respond with a value as msgpack if the request is msgpack, otherwise as JSON."""
    if is_binary(http):
        await http.respond(200, msgspec.msgpack.encode(value), BINARY)
    else:
        await http.respond(200, json.dumps(value).encode())


async def _text(service: Service, call: PredictCall) -> str:
    """The whole answer; with beam search, the best beam."""
    if call.request is None:
        return call.text
    choice = (await service.complete(call.request)).choices[0]
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=service.ready)
    return choice.text


async def _stream_once(http: RequestContext, text: str) -> None:
    """Stream text that is already complete, as one chunk."""
    await http.open_stream(BINARY, headers=STREAMED)
    await http.send(text.encode())
    await http.close_stream()


async def _stream(http: RequestContext, service: Service, request: GenerationRequest) -> None:
    """Stream text. An error after the first byte is the last chunk, as a JSON object."""
    async with aclosing(service.stream(request)) as batches:
        async for deltas in batches:
            failed = deltas[-1].finish_reason is FinishReason.ERROR
            if failed and not http.started:
                raise sequence_error(deltas[-1].error, ready=service.ready)
            if not http.started:
                await http.open_stream(BINARY, headers=STREAMED)
            text = "".join([delta.text for delta in deltas])
            if failed:
                text += json.dumps({"status": "error", "message": deltas[-1].error or "the sequence failed."})
            if text:
                await http.send(text.encode())
    await http.close_stream()
