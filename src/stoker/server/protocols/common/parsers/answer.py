"""Splits the text of an answer into reasoning, content and tool calls. The joined result does not depend on how the text is chunked."""

from __future__ import annotations

import msgspec

from stoker.server.protocols.common.parsers.reasoning.parser import ReasoningParser
from stoker.server.protocols.common.parsers.tools.parser import ToolCall, ToolParser


class AnswerParts(msgspec.Struct):
    """The parts of a whole answer, or the new parts of a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def joined_calls(parts: list[ToolCall]) -> list[ToolCall]:
    """Whole calls from their parts, which are in order."""
    calls: list[ToolCall] = []
    for part in parts:
        if part.id:
            calls.append(msgspec.structs.replace(part))
        else:
            calls[-1].arguments += part.arguments
    return calls


class AnswerParser:
    """The parser of one choice. The reasoning parser receives the text, and the tool parser receives the remaining content."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, one_call: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self.num_calls = 0  # that have started

    def push(self, text: str, *, last: bool) -> AnswerParts:
        """Add text. Returns the parts that are certain; with `last`, everything that is left."""
        reasoning, content = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        if last and self._reasoning is not None:
            more_reasoning, more_content = self._reasoning.flush()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self._tools is None:
            return AnswerParts(content, reasoning)
        content, calls = self._tools.push(content)
        if last:
            more, more_calls = self._tools.flush()
            content, calls = content + more, calls + more_calls
        if self._one_call:
            calls = [call for call in calls if call.index == 0]
        self.num_calls = max([self.num_calls, *(call.index + 1 for call in calls)])
        return AnswerParts(content, reasoning, calls)
