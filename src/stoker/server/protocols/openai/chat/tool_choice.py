"""The fields tools and tool_choice: the functions that the template receives, and the parser of the answer."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import Guide
from stoker.server.protocols.openai.parsers.tools import TOOL_PARSERS
from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser, read_json


class ToolUse(msgspec.Struct, frozen=True):
    """The checked fields. `tools` are passed to the template. With mode "forced", the model must call the function `forced`."""

    tools: list[dict[str, Any]]
    mode: Literal["none", "auto", "required", "forced"]
    forced: str = ""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def guide(self) -> Guide | None:
        """The grammar that enforces a call with the modes "forced" and "required"; otherwise None."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in self.tools}
        if self.mode == "forced":
            return Guide("json_schema", json.dumps(schemas[self.forced]))
        if self.mode == "required":
            calls = [
                {"type": "object", "properties": {"name": {"const": name}, "parameters": schema}, "required": ["name", "parameters"]}
                for name, schema in schemas.items()
            ]
            return Guide("json_schema", json.dumps({"type": "array", "minItems": 1, "items": {"anyOf": calls}}))
        return None

    def parser(self, name: str | None) -> ToolParser | None:
        """A new parser for one choice; `name` is of TOOL_PARSERS. Raises RequestError if a parser is needed and the server has none."""
        if self.mode == "none":
            return None
        if self.mode != "auto":
            return GuidedParser(self.names, self.forced)
        if name is None:
            cure = f"Start the server with --tool-parser {' | '.join(TOOL_PARSERS)}."
            raise RequestError("tools", self.tools, "the server has no parser for the model's tool calls", cure=cure)
        return TOOL_PARSERS.get(name)(self.names)


class GuidedParser(ToolParser):
    """Parses an answer that a grammar constrains to JSON: the arguments of one function, or a list of names and parameters."""

    def __init__(self, names: frozenset[str], forced: str) -> None:
        super().__init__(names)
        self._forced = forced
        self._held = ""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        return "", []

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        if self._forced:
            return "", [ToolCall(self.new_id(), self._forced, held.strip())]
        values = read_json(held)  # None if max_tokens truncated the JSON
        calls = [self.call(value, "parameters") for value in values] if isinstance(values, list) else []
        return ("", [call for call in calls if call is not None]) if calls else (held, [])


def read_tools(values: dict[str, Any]) -> ToolUse:
    """Check both fields. Raises RequestError."""
    tools = [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(values.get("tools", ()))]
    choice = values.get("tool_choice", "auto" if tools else "none")
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise RequestError("tool_choice", choice, "there are no tools")
        return ToolUse(tools if choice != "none" else [], choice if tools else "none")
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) and isinstance(choice.get("function", {}), dict) else None
    use = ToolUse(tools, "forced", name if isinstance(name, str) else "")
    if use.forced not in use.names:
        raise RequestError(
            "tool_choice",
            choice,
            f"it must be none, auto, required or name one of the tools: {', '.join(sorted(use.names)) or 'there are none'}",
        )
    return use


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
