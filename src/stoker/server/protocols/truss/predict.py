"""Answers of :predict: text as it comes, gathered into one JSON string, or {"text": …}."""

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
from stoker.server.protocols.truss.request import Asked


async def answer(http: RequestContext, service: Service, asked: Asked) -> None:
    """Raises StokerError before the first byte; a later failure is told in the stream."""
    if not asked.stream:
        await _respond(http, {"text": await _text(service, asked)})
    elif _gathers(http):
        await _respond(http, await _text(service, asked))
    elif asked.request is None or asked.request.params.beam_width > 1:
        await _in_one_piece(http, await _text(service, asked))
    else:
        await _stream(http, service, asked.request)


def _gathers(http: RequestContext) -> bool:
    """The Truss server's own rule: a client that takes JSON and nothing else gets no stream, but for OpenAI's."""
    wants_json = http.headers.get(b"accept") == JSON
    return wants_json and b"openai" not in http.headers.get(b"user-agent", b"").lower()


async def _respond(http: RequestContext, value: Any) -> None:
    if is_binary(http):
        await http.respond(200, msgspec.msgpack.encode(value), BINARY)
    else:
        await http.respond(200, json.dumps(value).encode())


async def _text(service: Service, asked: Asked) -> str:
    """All of the answer; of several beams the best."""
    if asked.request is None:
        return asked.text
    choice = (await service.complete(asked.request)).choices[0]
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=service.ready)
    return choice.text


async def _in_one_piece(http: RequestContext, text: str) -> None:
    await http.open_stream(BINARY, headers=STREAMED)
    await http.send(text.encode())
    await http.close_stream()


async def _stream(http: RequestContext, service: Service, request: GenerationRequest) -> None:
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
