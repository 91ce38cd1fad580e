"""Parsers that separate reasoning, between <think> and </think>, from the answer. `--reasoning-parser` uses the names of the table."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocols.common.parsers.markers import partial_marker_start

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """The parser of one answer. The result does not depend on how the text is chunked. White space around both parts is removed.

    With `opened`, the prompt ends with <think>, so that the answer starts with reasoning.
    """

    always_opened = False

    def __init__(self, opened: bool) -> None:
        self._held = ""
        self._state = "start"
        self._opened = opened or self.always_opened
        self._reasoning_started = False
        self._content_started = True  # False after reasoning, until the first character that is not white space

    def push(self, text: str) -> tuple[str, str]:
        """Add text. Returns (new reasoning, new content)."""
        if self._state == "content":
            return "", self._content(text)
        self._held += text
        if self._state == "start" and not self._detect_start():
            return "", ""
        return self._take_reasoning() if self._state == "reasoning" else ("", self._content(self._take()))

    def flush(self) -> tuple[str, str]:
        """End the text. Returns the remaining (reasoning, content)."""
        held = self._take()
        if self._state == "reasoning" or (self._state == "start" and self._opened):
            return held.strip() if not self._reasoning_started else held.rstrip(), ""
        return "", self._content(held)

    def _detect_start(self) -> bool:
        """Decide whether the answer starts with reasoning. Returns False if more text is needed for that."""
        start = self._held.lstrip()
        if not start or (len(start) < len(OPEN) and OPEN.startswith(start)):
            return False
        if start.startswith(OPEN):
            self._state, self._held = "reasoning", start[len(OPEN) :]
        else:
            self._state = "reasoning" if self._opened else "content"
        return True

    def _take_reasoning(self) -> tuple[str, str]:
        """(reasoning, content) of the held text, except for what may be the start of </think>."""
        if not self._reasoning_started:
            self._held = self._held.lstrip()
            self._reasoning_started = bool(self._held)
        if (end := self._held.find(CLOSE)) >= 0:
            reasoning, rest = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._held, self._state = "", "content"
            self._content_started = False
            return reasoning, self._content(rest)
        end = len(self._held[: partial_marker_start(self._held, CLOSE)].rstrip())
        reasoning, self._held = self._held[:end], self._held[end:]
        return reasoning, ""

    def _content(self, text: str) -> str:
        """Content without the white space that follows the reasoning."""
        if not self._content_started:
            text = text.lstrip()
            self._content_started = bool(text)
        return text

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held


class DeepSeekR1Parser(ReasoningParser):
    """For models whose answers start with reasoning, also if the prompt does not end with <think>."""

    always_opened = True


REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry("reasoning parser")
REASONING_PARSERS.add("qwen3", ReasoningParser)
REASONING_PARSERS.add("deepseek_r1", DeepSeekR1Parser)
