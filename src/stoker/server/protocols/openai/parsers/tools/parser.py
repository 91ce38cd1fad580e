"""The interface of tool-call parsers, which separate whole calls from text. The result does not depend on how the text is chunked."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from typing import Any

import msgspec

_ALPHABET = string.ascii_letters + string.digits


class ToolCall(msgspec.Struct):
    """One call. `arguments` is JSON text, as in OpenAI's API."""

    id: str
    name: str
    arguments: str


class ToolParser(ABC):
    """The parser of one answer. `names` are the tools of the request."""

    needs_special_tokens = False  # True if the markers are special tokens, which must then be part of the text

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text. Returns (new text, new calls)."""

    @abstractmethod
    def flush(self) -> tuple[str, list[ToolCall]]:
        """End the text. Returns the remaining (text, calls). What starts like a call but is none is text."""

    def call(self, value: Any, arguments_key: str = "arguments") -> ToolCall | None:
        """The call of an object {"name": …, "arguments": …}; None for any other value."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return None
        arguments = value.get(arguments_key, {})
        try:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            return None
        return ToolCall(self.new_id(), _unicode(value["name"]), _unicode(text))

    def new_id(self) -> str:
        return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """An id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _unicode(text: str) -> str:
    """The text with U+FFFD instead of lone surrogates, which JSON escapes can contain and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_json(text: str) -> Any:
    """The JSON value of the whole `text`; None if it is not JSON."""
    try:
        return json.loads(text, strict=False)  # models write raw newlines inside strings
    except (ValueError, RecursionError):
        return None


def read_first_json(text: str) -> tuple[Any, int]:
    """(the JSON value at the start of `text`, the index of its end); (None, 0) if there is none."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
