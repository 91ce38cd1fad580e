"""OpenAI's objects for the parts of an answer: `message` of a whole response, `delta` of a chunk."""

from __future__ import annotations

from typing import Any

from stoker.server.protocols.common.parsers.answer import AnswerParts, joined_calls
from stoker.server.protocols.common.parsers.tools.parser import ToolCall


def message_object(parts: AnswerParts, *, reasoning: bool, role: str = "assistant") -> dict[str, Any]:
    """OpenAI's `message` of a whole answer. It has the member reasoning_content, which may be null, only with `reasoning`.

    `content` is null if it is empty beside calls or reasoning.
    """
    result: dict[str, Any] = {"role": role, "content": parts.content or (None if parts.calls or parts.reasoning else "")}
    if reasoning:
        result["reasoning_content"] = parts.reasoning or None
    if parts.calls:
        result["tool_calls"] = [_tool_call(call) for call in joined_calls(parts.calls)]
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
    """OpenAI's object of a call, or of a new part of it, which has only arguments."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
