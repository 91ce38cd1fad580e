"""The tools of a chat request: the functions that the template receives, the grammar that enforces calls, and the parser of the answer."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import Guide
from stoker.server.protocols.common.parsers.tools import TOOL_PARSERS
from stoker.server.protocols.common.parsers.tools.guided import ForcedParser, RequiredParser
from stoker.server.protocols.common.parsers.tools.parser import ToolParser

MAX_NAME_CHARS = 256


class ToolUse(msgspec.Struct, frozen=True):
    """The checked fields. `tools` are passed to the template. With mode "forced", the model must call the function `forced`."""

    tools: list[dict[str, Any]]
    mode: Literal["none", "auto", "required", "forced"]
    forced: str = ""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Name of each tool → JSON schema of its arguments."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in self.tools}

    def guide(self, *, one_call: bool) -> Guide | None:
        """The grammar that enforces a call with the modes "forced" and "required"; otherwise None. `one_call` allows only one."""
        schemas = self.schemas
        if self.mode == "forced":
            return Guide("json_schema", json.dumps(schemas[self.forced]))
        if self.mode == "required":
            calls = [
                {"type": "object", "properties": {"name": {"const": name}, "parameters": schema}, "required": ["name", "parameters"]}
                for name, schema in schemas.items()
            ]
            limits = {"minItems": 1, "maxItems": 1} if one_call else {"minItems": 1}
            return Guide("json_schema", json.dumps({"type": "array", **limits, "items": {"anyOf": calls}}))
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


def function_tool(name: Any, description: Any, parameters: Any, *, field: str, schema_name: str) -> dict[str, Any]:
    """A function in the form of chat templates. `schema_name` is the name of `parameters` in the API. Raises RequestError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise RequestError(f"{field}.name", name, f"it must be a string of 1 to {MAX_NAME_CHARS} characters")
    if not isinstance(parameters, dict):
        raise RequestError(f"{field}.{schema_name}", parameters, "it must be a JSON schema")
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}
