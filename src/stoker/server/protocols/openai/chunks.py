"""Server-sent events, built from parts that are made once for a request: a token costs one concatenation and one JSON string."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.types import Usage
from stoker.server.protocols.openai import response_json as wire

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


class Chunks:
    """Chunks of one answer. `shape` puts a piece of text into a choice: text (completions) or delta.content (chat)."""

    def __init__(self, head: dict[str, Any], *, chat: bool, include_usage: bool) -> None:
        self._head = b"data: " + _json(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._chat = chat
        self._before: list[bytes] = []  # by choice: everything before a piece of text
        self._after = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}' + self._end

    def text(self, index: int, text: str) -> bytes:
        """A piece of text and nothing else: the chunk of nearly every token."""
        while index >= len(self._before):
            inner = b'"delta":{"content":' if self._chat else b'"text":'
            self._before.append(self._head + b'{"index":%d,' % len(self._before) + inner)
        return self._before[index] + _json(text) + self._after

    def choice(self, choice: dict[str, Any], usage: Usage | None = None) -> bytes:
        """A chunk with one choice as it is given, and the usage so far when clients want it in every chunk."""
        end = self._end if usage is None else b'],"usage":' + _json(wire.usage_object(usage)) + b"}\n\n"
        return self._head + _json(choice) + end

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, all of the usage."""
        return self._head + b'],"usage":' + _json(wire.usage_object(usage)) + b"}\n\n"
