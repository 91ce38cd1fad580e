"""The interface of reasoning parsers, and the base of formats with reasoning between two markers at the start of the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from stoker.server.protocols.common.parsers.markers import first_marker, is_partial, partial_marker_start


class ReasoningParser(ABC):
    """The parser of one answer. The whole result does not depend on how the text is chunked."""

    template_marks: ClassVar[tuple[str, ...]] = ()  # texts that occur together in the chat templates of the family; empty: not selected
    start_marker: ClassVar[str] = ""  # a single token without which an answer contains no reasoning, unless it is opened; empty: always
    end_marker: ClassVar[str] = ""  # after it, a grammar can constrain the answer; empty: a constrained answer contains no reasoning
    max_end_tokens: ClassVar[int] = 1  # of the end marker
    precedes_calls: ClassVar[bool] = True  # whether the end marker also precedes calls that a grammar enforces
    needs_special_tokens: ClassVar[bool] = False  # True if the markers are special tokens, which must then be part of the text

    def __init__(self, opened: bool) -> None:
        """With `opened`, the answer starts inside the reasoning; see `opened_by`."""
        self._opened = opened

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether an answer to this prompt starts inside the reasoning, because the prompt ends with its marker."""
        return False

    @abstractmethod
    def push(self, text: str) -> tuple[str, str]:
        """Add text. Returns (new reasoning, new content)."""

    @abstractmethod
    def flush(self) -> tuple[str, str]:
        """End the text. Returns the remaining (reasoning, content)."""


class MarkedReasoningParser(ReasoningParser):
    """Reasoning from one of `opens` to one of `closes`. White space around both parts is removed.

    With `opened`, the answer starts with reasoning, and the opening marker is optional.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]]
    interrupts: ClassVar[tuple[str, ...]] = ()  # markers that end the reasoning too, and are part of the content

    def __init__(self, opened: bool) -> None:
        super().__init__(opened)
        self._held = ""
        self._state = "start"
        self.reasoned = False  # whether the reasoning has ended
        self._reasoning_started = False
        self._content_started = True  # False after reasoning, until the first character that is not white space

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether the prompt, without white space at its end, ends with one of `opens`."""
        return prompt.rstrip().endswith(cls.opens)

    def push(self, text: str) -> tuple[str, str]:
        if self._state == "content":
            return "", self._content(text)
        self._held += text
        if self._state == "start" and not self._detect_start():
            return "", ""
        return self._take_reasoning() if self._state == "reasoning" else ("", self._content(self._take()))

    def flush(self) -> tuple[str, str]:
        held = self._take()
        if self._state == "reasoning" or (self._state == "start" and self._opened):
            return held.strip() if not self._reasoning_started else held.rstrip(), ""
        return "", self._content(held)

    def _detect_start(self) -> bool:
        """Decide whether the answer starts with reasoning. Returns False if more text is needed for that."""
        start = self._held.lstrip()
        if is_partial(start, *self.opens):
            return False
        marker = next((marker for marker in self.opens if start.startswith(marker)), None)
        if marker is not None:
            self._state, self._held = "reasoning", start[len(marker) :]
        else:
            self._state = "reasoning" if self._opened else "content"
        return True

    def _take_reasoning(self) -> tuple[str, str]:
        """(reasoning, content) of the held text, except for what may be the start of a marker."""
        if not self._reasoning_started:
            self._held = self._held.lstrip()
            self._reasoning_started = bool(self._held)
        if (found := first_marker(self._held, self.closes + self.interrupts)) is not None:
            end, marker = found
            reasoning, rest = self._held[:end].rstrip(), self._held[end if marker in self.interrupts else end + len(marker) :]
            self._held, self._state, self.reasoned = "", "content", True
            self._content_started = False
            return reasoning, self._content(rest)
        end = len(self._held[: partial_marker_start(self._held, *self.closes, *self.interrupts)].rstrip())
        reasoning, self._held = self._held[:end], self._held[end:]
        return reasoning, ""

    def _content(self, text: str) -> str:
        """Content without the white space that follows the reasoning."""
        if not self._content_started:
            text = text.lstrip()
            self._content_started = bool(text)
        return text

    def _take(self) -> str:
        """Remove the held text and return it."""
        held, self._held = self._held, ""
        return held
