"""Server-sent events of streamed responses, joined from parts that are encoded once per request.

A token costs one concatenation and the encoding of one JSON string.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.base.types import Usage
from stoker.server.protocols.openai import response_json as wire

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """A server-sent event with this value as JSON."""
    return b"data: " + _json(value) + b"\n\n"


class Chunks:
    """Encodes the chunks of one response. Text is in delta.content with `chat`, otherwise in text."""

    def __init__(self, head: dict[str, Any], *, chat: bool, include_usage: bool) -> None:
        self._head = b"data: " + _json(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._chat = chat
        self._before: list[bytes] = []  # by choice: the JSON before the text
        self._after = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}' + self._end

    def text(self, index: int, text: str) -> bytes:
        """A chunk with new text only, which is the chunk of nearly every token."""
        while index >= len(self._before):
            inner = b'"delta":{"content":' if self._chat else b'"text":'
            self._before.append(self._head + b'{"index":%d,' % len(self._before) + inner)
        return self._before[index] + _json(text) + self._after

    def choice(self, choice: dict[str, Any], usage: Usage | None = None, prompt_ids: str | list[int] | None = None) -> bytes:
        """A chunk with one choice, and the usage so far and the prompt's token ids unless they are None."""
        end = self._end if usage is None else b'],"usage":' + _json(wire.usage_object(usage)) + b"}\n\n"
        if prompt_ids is not None:
            end = b'],"prompt_token_ids":' + _json(prompt_ids) + end[1:]
        return self._head + _json(choice) + end

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, which has no choices and the whole usage."""
        return self._head + b'],"usage":' + _json(wire.usage_object(usage)) + b"}\n\n"
