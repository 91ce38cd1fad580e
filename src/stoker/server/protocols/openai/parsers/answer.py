"""Splits the text of an answer into reasoning, content and tool calls. The joined result does not depend on how the text is chunked."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.server.protocols.openai.parsers.reasoning import ReasoningParser
from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser


class AnswerParts(msgspec.Struct):
    """The parts of a whole answer, or the new parts of a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def message_object(parts: AnswerParts, *, reasoning: bool, role: str = "assistant") -> dict[str, Any]:
    """OpenAI's `message` of a whole answer. With `reasoning`, it has the member reasoning_content even if that is null."""
    result: dict[str, Any] = {"role": role, "content": parts.content or (None if parts.calls or parts.reasoning else "")}
    if reasoning:
        result["reasoning_content"] = parts.reasoning or None
    if parts.calls:
        result["tool_calls"] = [_tool_call(call) for call in _joined(parts.calls)]
    return result


def delta_object(parts: AnswerParts) -> dict[str, Any]:
    """OpenAI's `delta` of new parts. The first part of a tool call has its id and name, later ones only more arguments."""
    result: dict[str, Any] = {}
    if parts.reasoning:
        result["reasoning_content"] = parts.reasoning
    if parts.content:
        result["content"] = parts.content
    if parts.calls:
        result["tool_calls"] = [{"index": call.index, **_tool_call(call)} for call in parts.calls]
    return result


def _tool_call(call: ToolCall) -> dict[str, Any]:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _joined(parts: list[ToolCall]) -> list[ToolCall]:
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
