"""Reasoning of Granite: "Here is my thought process: … Here is my response: …" (3.2), or <think>…</think><response>…</response> (3.3)."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.markers import is_partial, partial_marker_start
from stoker.server.protocols.common.parsers.reasoning.parser import MarkedReasoningParser

OPEN, CLOSE = "<response>", "</response>"


class GraniteReasoning(MarkedReasoningParser):
    """<response> and </response> around the content are removed if reasoning precedes them."""

    template_marks = ("Write your thoughts",)
    opens = ("Here is my thought process:", "Here's my thought process:", "<think>")
    closes = ("Here is my response:", "Here's my response:", "</think>")

    def __init__(self, opened: bool) -> None:
        super().__init__(opened)
        self._response = _Response()

    def push(self, text: str) -> tuple[str, str]:
        reasoning, content = super().push(text)
        return reasoning, self._response.push(content) if self.reasoned else content

    def flush(self) -> tuple[str, str]:
        reasoning, content = super().flush()
        return reasoning, self._response.push(content) + self._response.flush() if self.reasoned else content


class _Response:
    """Removes <response> at the start of a text, and the following </response>."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "start"

    def push(self, text: str) -> str:
        """The text without the markers. A part that may be the start of a marker is held until the next call."""
        text, self._held = self._held + text, ""
        if self._state == "start":
            if is_partial(text, OPEN):
                self._held = text
                return ""
            self._state = "inside" if text.startswith(OPEN) else "outside"
            text = text.removeprefix(OPEN)
        if self._state == "outside":
            return text
        if (end := text.find(CLOSE)) >= 0:
            self._state = "outside"
            return text[:end].rstrip() + text[end + len(CLOSE) :]
        end = len(text[: partial_marker_start(text, CLOSE)].rstrip())
        text, self._held = text[:end], text[end:]
        return text

    def flush(self) -> str:
        """The held text, after the last `push`."""
        held, self._held = self._held, ""
        return held
