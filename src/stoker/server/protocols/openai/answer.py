"""An answer's text in its parts: reasoning, content and tool calls. However the text is cut, the parts join to the same."""

from __future__ import annotations

import msgspec

from stoker.server.protocols.openai.reasoning import ReasoningParser
from stoker.server.protocols.openai.tools.parser import ToolCall, ToolParser


class Parts(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser:
    """For one choice. The content is what the reasoning parser leaves, less the calls that the tool parser finds in it."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, one_call: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self.num_calls = 0

    def push(self, text: str, *, last: bool) -> Parts:
        """The parts that are certain now; with `last`, all that is left."""
        reasoning, content = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        if last and self._reasoning is not None:
            more_reasoning, more_content = self._reasoning.flush()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self._tools is None:
            return Parts(content, reasoning)
        content, calls = self._tools.push(content)
        if last:
            more, more_calls = self._tools.flush()
            content, calls = content + more, calls + more_calls
        return Parts(content, reasoning, self._kept(calls))

    def _kept(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._one_call:
            calls = calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(calls)
        return calls
