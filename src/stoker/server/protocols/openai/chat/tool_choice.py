"""The fields tools and tool_choice: the functions that the template receives, and the parser of the answer."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import Guide
from stoker.server.protocols.openai.parsers.tools import TOOL_PARSERS
from stoker.server.protocols.openai.parsers.tools.json_calls import JsonCalls
from stoker.server.protocols.openai.parsers.tools.parser import Schemas, ToolCall, ToolParser


class ToolUse(msgspec.Struct, frozen=True):
    """The checked fields. `tools` are passed to the template. With mode "forced", the model must call the function `forced`."""

    tools: list[dict[str, Any]]
    mode: Literal["none", "auto", "required", "forced"]
    forced: str = ""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Name of each tool → JSON schema of its arguments."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in self.tools}

    def guide(self) -> Guide | None:
        """The grammar that enforces a call with the modes "forced" and "required"; otherwise None."""
        schemas = self.schemas
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
            return ForcedParser(self.schemas, self.forced) if self.mode == "forced" else RequiredParser(self.schemas)
        if name is None:
            cure = f"Start the server with --tool-parser {' | '.join(TOOL_PARSERS)}."
            raise RequestError("tools", self.tools, "the server has no parser for the model's tool calls", cure=cure)
        return TOOL_PARSERS.get(name)(self.schemas)


class ForcedParser(ToolParser):
    """Parses an answer that a grammar constrains to the arguments of one function."""

    def __init__(self, schemas: Schemas, name: str) -> None:
        super().__init__(schemas)
        self._name = name

    def _advance(self) -> bool:
        if not self._num_calls and self._held.strip():
            self.open_call(self._name)
            self._held = self._held.lstrip()
        if self._num_calls:
            end = len(self._held.rstrip())  # white space at the end is not part of the arguments
            self.add_arguments(self._held[:end])
            self._held = self._held[end:]
        return False

    def flush(self) -> tuple[str, list[ToolCall]]:
        self._held = ""
        if not self._num_calls:
            self.open_call(self._name)
        return self._take_output()


class RequiredParser(ToolParser):
    """Parses an answer that a grammar constrains to a list of names and parameters. Other text is content."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._start_section()
        self._reader = JsonCalls(self, opening="[", closing="]", separators=",")

    def _advance(self) -> bool:
        self._consume(self._reader.push(self._held))
        return False


def read_tools(values: dict[str, Any]) -> ToolUse:
    """Check both fields. Raises RequestError."""
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
