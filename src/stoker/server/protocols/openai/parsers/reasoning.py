"""Reasoning between <think> and </think>, apart from the answer. By the name that `--reasoning-parser` uses."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocols.openai.parsers.marks import held_from

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """For one answer; however its text is cut, the outcome is the same. White space around both parts is left out.

    `opened`: the prompt ends with the open mark, so that the answer begins inside.
    """

    always_opened = False

    def __init__(self, opened: bool) -> None:
        self._held = ""
        self._state = "start"
        self._opened = opened or self.always_opened
        self._reasoning_begun = False
        self._content_begun = True  # until reasoning comes before it

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning and new answer."""
        if self._state == "content":
            return "", self._content(text)
        self._held += text
        if self._state == "start" and not self._begin():
            return "", ""
        return self._inside() if self._state == "reasoning" else ("", self._content(self._take()))

    def flush(self) -> tuple[str, str]:
        """The rest, at the end. White space at the end of reasoning is left out."""
        held = self._take()
        if self._state == "reasoning" or (self._state == "start" and self._opened):
            return held.strip() if not self._reasoning_begun else held.rstrip(), ""
        return "", self._content(held)

    def _begin(self) -> bool:
        """Decide whether the answer begins with reasoning; False while that cannot be told."""
        start = self._held.lstrip()
        if not start or (len(start) < len(OPEN) and OPEN.startswith(start)):
            return False
        if start.startswith(OPEN):
            self._state, self._held = "reasoning", start[len(OPEN) :]
        else:
            self._state = "reasoning" if self._opened else "content"
        return True

    def _inside(self) -> tuple[str, str]:
        if not self._reasoning_begun:
            self._held = self._held.lstrip()
            self._reasoning_begun = bool(self._held)
        if (end := self._held.find(CLOSE)) >= 0:
            reasoning, rest = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._held, self._state = "", "content"
            self._content_begun = False
            return reasoning, self._content(rest)
        end = len(self._held[: held_from(self._held, CLOSE)].rstrip())
        reasoning, self._held = self._held[:end], self._held[end:]
        return reasoning, ""

    def _content(self, text: str) -> str:
        """The answer loses the white space that it begins with."""
        if not self._content_begun:
            text = text.lstrip()
            self._content_begun = bool(text)
        return text

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held


class DeepSeekR1Parser(ReasoningParser):
    """Its answers begin inside the reasoning, whether the template says so or not."""

    always_opened = True


REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry("reasoning parser")
REASONING_PARSERS.add("qwen3", ReasoningParser)
REASONING_PARSERS.add("deepseek_r1", DeepSeekR1Parser)
