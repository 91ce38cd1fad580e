"""The fields tools and tool_choice of OpenAI's API."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import RequestError
from stoker.server.protocols.common.chat.tools import ToolUse


def read_tools(values: dict[str, Any]) -> ToolUse:
    """Check the fields tools and tool_choice. Raises RequestError."""
    tools = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(values.get("tools", ()))]
    choice = values.get("tool_choice", "auto" if tools else "none")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed_tools(choice, tools)
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise RequestError("tool_choice", choice, "there are no tools")
        return ToolUse(tools if choice != "none" else [], choice if tools else "none")
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) and isinstance(choice.get("function", {}), dict) else None
    use = ToolUse(tools, "forced", name if isinstance(name, str) else "")
    if use.forced not in use.schemas:
        raise RequestError(
            "tool_choice",
            choice,
            f"it must be none, auto, required or name one of the tools: {', '.join(sorted(use.schemas)) or 'there are none'}",
        )
    return use


def _allowed_tools(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The tools that tool_choice allows, and its mode."""
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list):
        limit = 'it must be {"mode": "auto" or "required", "tools": […]}'
        raise RequestError("tool_choice.allowed_tools", allowed, limit)
    by_name = {tool["function"]["name"]: tool for tool in tools}
    chosen = []
    for i, item in enumerate(listed):
        function = item.get("function") if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in by_name:
            limit = f"it must name one of the tools: {', '.join(sorted(by_name)) or 'there are none'}"
            raise RequestError(f"tool_choice.allowed_tools.tools[{i}]", item, limit)
        chosen.append(by_name[name])
    return chosen, mode


def _check_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """The tool. Raises RequestError unless it is a function with a name and optional parameters."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(field, tool, 'it must be {"type": "function", "function": {…}}')
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise RequestError(f"{field}.function.name", name, "it must be a string of 1 to 256 characters")
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        raise RequestError(f"{field}.function.parameters", function["parameters"], "it must be a JSON schema")
    return tool
