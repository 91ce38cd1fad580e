"""Sends the answer to a chat turn while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.server.http.request_context import EVENT_STREAM, RequestContext
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.blocks import BlockEvent


async def send_answer(
    http: RequestContext,
    answer: Answer,
    start: Callable[[], bytes],
    push: Callable[[list[BlockEvent]], bytes],
    content_type: bytes = EVENT_STREAM,
) -> StokerError | None:
    """Generate the answer, and send the bytes of `start` once and of `push` for each list of events. The caller ends the stream.

    Returns the error of an answer that fails after the stream was opened, or None. Raises StokerError before that.
    """
    try:
        async with aclosing(answer.stream()) as batches:
            async for batch in batches:
                first = b""
                if not http.started:
                    first = start()
                    await http.open_stream(content_type)
                if data := first + push(batch):
                    await http.send(data)
    except StokerError as error:
        if not http.started:
            raise
        return error
    return None


def encode_events(events: list[dict[str, Any]]) -> bytes:
    """The server-sent events whose names are the types of `events` and whose data is their JSON."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events])
