"""Answers of :predict: text as it comes, gathered into one JSON string, or {"text": …}."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.types import FinishReason, GenerationRequest
from stoker.frontend.service import Service
from stoker.server.errors import sequence_error
from stoker.server.http.request_context import JSON, STREAMED, Exchange
from stoker.server.protocols.truss.body import BINARY, is_binary
from stoker.server.protocols.truss.request import Asked


async def answer(exchange: Exchange, service: Service, asked: Asked) -> None:
    """Raises StokerError before the first byte; a later failure is told in the stream."""
    if not asked.stream:
        await _respond(exchange, {"text": await _text(service, asked)})
    elif _gathers(exchange):
        await _respond(exchange, await _text(service, asked))
    elif asked.request is None or asked.request.params.beam_width > 1:
        await _in_one_piece(exchange, await _text(service, asked))
    else:
        await _stream(exchange, service, asked.request)


def _gathers(exchange: Exchange) -> bool:
    """The Truss server's own rule: a client that takes JSON and nothing else gets no stream, but for OpenAI's."""
    wants_json = exchange.headers.get(b"accept") == JSON
    return wants_json and b"openai" not in exchange.headers.get(b"user-agent", b"").lower()


async def _respond(exchange: Exchange, value: Any) -> None:
    if is_binary(exchange):
        await exchange.respond(200, msgspec.msgpack.encode(value), BINARY)
    else:
        await exchange.respond(200, json.dumps(value).encode())


async def _text(service: Service, asked: Asked) -> str:
    """All of the answer; of several beams the best."""
    if asked.request is None:
        return asked.text
    choice = (await service.complete(asked.request)).choices[0]
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=service.ready)
    return choice.text


async def _in_one_piece(exchange: Exchange, text: str) -> None:
    await exchange.open_stream(BINARY, headers=STREAMED)
    await exchange.send(text.encode())
    await exchange.close_stream()


async def _stream(exchange: Exchange, service: Service, request: GenerationRequest) -> None:
    async with aclosing(service.stream(request)) as batches:
        async for deltas in batches:
            failed = deltas[-1].finish_reason is FinishReason.ERROR
            if failed and not exchange.started:
                raise sequence_error(deltas[-1].error, ready=service.ready)
            if not exchange.started:
                await exchange.open_stream(BINARY, headers=STREAMED)
            text = "".join([delta.text for delta in deltas])
            if failed:
                text += json.dumps({"status": "error", "message": deltas[-1].error or "the sequence failed."})
            if text:
                await exchange.send(text.encode())
    await exchange.close_stream()
