"""An answer's text in its parts: reasoning, content and tool calls. However the text is cut, the parts join to the same."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.server.protocols.openai.parsers.reasoning import ReasoningParser
from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser


class Parts(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def message_object(parts: Parts, *, reasoning: bool) -> dict[str, Any]:
    """The whole answer as OpenAI's message; with `reasoning`, the member is there even when it is null."""
    shown: dict[str, Any] = {"role": "assistant", "content": parts.content or (None if parts.calls or parts.reasoning else "")}
    if reasoning:
        shown["reasoning_content"] = parts.reasoning or None
    if parts.calls:
        shown["tool_calls"] = [_tool_call(call) for call in parts.calls]
    return shown


def delta_object(parts: Parts, num_calls: int) -> dict[str, Any]:
    """A piece of the answer as OpenAI's delta; `num_calls` came before it."""
    shown: dict[str, Any] = {}
    if parts.reasoning:
        shown["reasoning_content"] = parts.reasoning
    if parts.content:
        shown["content"] = parts.content
    if parts.calls:
        shown["tool_calls"] = [{"index": num_calls + i, **_tool_call(call)} for i, call in enumerate(parts.calls)]
    return shown


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


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
        return Parts(content, reasoning, self._limit_calls(calls))

    def _limit_calls(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._one_call:
            calls = calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(calls)
        return calls
