"""What every tool parser is: text in, plain text and whole calls out. However the text is cut, the outcome is the same."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from typing import Any

import msgspec

_ALPHABET = string.ascii_letters + string.digits


class ToolCall(msgspec.Struct):
    """`arguments` is JSON text, as OpenAI has it."""

    id: str
    name: str
    arguments: str


class ToolParser(ABC):
    """For one answer. `names` are the tools of the request."""

    needs_special_tokens = False  # the marks are special tokens, which must then make text

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    @abstractmethod
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are complete now."""

    @abstractmethod
    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end. What began like a call but is none comes as text."""

    def call(self, value: Any, arguments_key: str = "arguments") -> ToolCall | None:
        """A call from {"name": …, "arguments": …}; None when it is something else."""
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
    """Nine letters and digits: the only ids that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _unicode(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON's escapes can spell and no answer can carry."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_json(text: str) -> Any:
    """The JSON value that is all of `text`; None when it is not JSON."""
    try:
        return json.loads(text, strict=False)  # models write raw newlines inside strings
    except (ValueError, RecursionError):
        return None


def read_first_json(text: str) -> tuple[Any, int]:
    """The JSON value that `text` begins with and where it ends; (None, 0) when there is none."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
