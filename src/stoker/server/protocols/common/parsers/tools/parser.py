"""The interface of tool-call parsers, which separate calls from text. The joined result does not depend on how the text is chunked."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from stoker.server.protocols.common.parsers.markers import first_marker, partial_marker_start

Schemas = Mapping[str, dict[str, Any]]  # name of each tool → JSON schema of its arguments

_ALPHABET = string.ascii_letters + string.digits


class ToolCall(msgspec.Struct):
    """One call, or a new part of it. Only the first part has an id and a name. Joined `arguments` are JSON text, as in OpenAI's API."""

    index: int  # number of the call in the answer, from 0
    arguments: str = ""
    id: str = ""
    name: str = ""


class ToolParser(ABC):
    """The parser of one answer.

    A subclass implements `_advance`, which consumes the held text and emits text and calls. A section is the text from the start of a
    possible call: `_start_section`, then `_consume`, then `_end_section`. A section without a call is text.
    """

    template_marks: ClassVar[tuple[str, ...]] = ()  # texts that occur together in the chat templates of the family; empty: not selected
    needs_special_tokens = False  # True if the markers are special tokens, which must then be part of the text

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._held = ""  # text that is not consumed yet
        self._inside = False  # whether a section has started
        self._section: str | None = None  # the text of the section; None once it contains a call
        self._num_calls = 0
        self._ids: set[str] = set()
        self._text = ""  # new text and calls since the last push
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text. Returns (new text, new calls and parts of calls)."""
        self._held += text
        while self._advance():
            pass
        return self._take_output()

    def flush(self) -> tuple[str, list[ToolCall]]:
        """End the text. Returns the remaining (text, calls). A call that was emitted in part remains as it is."""
        held, self._held = self._held, ""
        if not self._inside or self._section is not None:
            self._text += (self._section or "") + held
        self._inside, self._section = False, None
        return self._take_output()

    def accepts(self, name: str) -> bool:
        """Whether an object of this name is a call. Formats without markers accept only the tools of the request."""
        return bool(name)

    def open_call(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call. An id that an earlier call of the answer has is replaced."""
        self._section = None
        if not call_id or call_id in self._ids:
            call_id = self.new_id()
        self._ids.add(call_id)
        self._calls.append(ToolCall(self._num_calls, "", call_id, valid_unicode(name)))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Emit more arguments of the last call."""
        if self._calls and self._calls[-1].index == self._num_calls - 1:
            self._calls[-1].arguments += text
        elif text:
            self._calls.append(ToolCall(self._num_calls - 1, text))

    def new_id(self) -> str:
        """A new id for a call, in the form that the model's template expects."""
        return "call_" + secrets.token_hex(12)

    @abstractmethod
    def _advance(self) -> bool:
        """Consume held text. Returns False when nothing more is certain before the next push."""

    def _start_section(self) -> None:
        """A section of calls begins. Its text is kept, because it becomes content if it contains no call."""
        self._inside, self._section = True, ""

    def _end_section(self) -> None:
        """The section ends. If it contained no call, its text becomes content."""
        self._text += self._section or ""
        self._inside, self._section = False, None

    def _consume(self, size: int) -> None:
        """Remove held text that belongs to the section."""
        if self._section is not None:
            self._section += self._held[:size]
        self._held = self._held[size:]

    def _find_section(self, *markers: str) -> bool:
        """Start a section at the first of the markers, with the white space before it. Earlier text is emitted.

        Returns whether a marker was found.
        """
        found = first_marker(self._held, markers)
        start = found[0] if found is not None else partial_marker_start(self._held, *markers)
        end = len(self._held[:start].rstrip())
        self._text, self._held = self._text + self._held[:end], self._held[end:]
        if found is None:
            return False
        self._start_section()
        self._consume(start - end + len(found[1]))
        return True

    def _skip_space(self) -> None:
        """Remove white space at the start of the held text."""
        self._consume(len(self._held) - len(self._held.lstrip()))

    def _take_output(self) -> tuple[str, list[ToolCall]]:
        """The content and the calls since the previous output."""
        text, calls = self._text, self._calls
        self._text, self._calls = "", []
        return text, calls


def short_id() -> str:
    """An id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def valid_unicode(text: str) -> str:
    """The text with U+FFFD instead of lone surrogates, which JSON escapes can contain and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_text(value: Any) -> str:
    """The JSON text of a value; the value itself if it is text."""
    return valid_unicode(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def read_json(text: str) -> Any:
    """The JSON value of the whole `text`; None if it is not JSON."""
    try:
        return json.loads(text, strict=False)  # models write raw newlines inside strings
    except (ValueError, RecursionError):
        return None
