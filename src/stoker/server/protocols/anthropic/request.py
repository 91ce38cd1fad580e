"""A request of POST /v1/messages, checked, with its prompt rendered and tokenized."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, Guide, SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.anthropic.blocks import read_conversation
from stoker.server.protocols.anthropic.fields import MAX_TOKENS, OUTPUT_CONFIG, TABLE, THINKING, TOOL, TOOL_CHOICE
from stoker.server.protocols.common.chat.template_values import read_template_kwargs, thinking_switches
from stoker.server.protocols.common.chat.tools import ToolUse, function_tool
from stoker.server.protocols.common.chat.turn import ChatTurn, prepare_turn
from stoker.server.settings import ServerSettings

_TARGETS = tuple(TABLE.targets().items())
_PASSED = ("priority", "cache_salt")  # fields of GenerationRequest
DEFAULT_TEMPERATURE = 1.0  # Anthropic's default


class MessageCall(msgspec.Struct, kw_only=True):
    """A checked request."""

    id: str
    turn: ChatTurn
    stream: bool
    thinking: bool  # the response contains thinking blocks
    thinking_text: bool  # with their text


async def read_message_call(values: dict[str, Any], service: Service, settings: ServerSettings, *, count_only: bool = False) -> MessageCall:
    """Check the fields of a request, which have the types of the table, and render the prompt.

    With `count_only`, max_tokens is not required. Raises RequestError.
    """
    if "max_tokens" not in values and not count_only:
        raise RequestError("max_tokens", None, "it is missing")
    if "messages" not in values:
        raise RequestError("messages", None, "it is missing")
    messages = read_conversation(values.get("system"), values["messages"]).messages
    tools, one_call = _read_tools(values)
    thinking = THINKING.check(values.get("thinking", {}), prefix="thinking.")
    output = OUTPUT_CONFIG.check(values.get("output_config", {}), prefix="output_config.")
    enabled = thinking.get("type", "disabled") != "disabled"
    template_values = {**thinking_switches(enabled), **({"reasoning_effort": output["effort"]} if "effort" in output else {})}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        template_values |= {"continue_final_message": True, "add_generation_prompt": False}
    params: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE, "skip_special_tokens": settings.skip_special_tokens}
    params |= {target: values[name] for name, target in _TARGETS if name in values}
    params["guide"] = _guide(output.get("format", values.get("output_format")))
    request = GenerationRequest(
        request_id=f"msg_{secrets.token_hex(16)}",
        prompt="",
        params=SamplingParams(max_tokens=MAX_TOKENS, **params),
        add_special_tokens=False,
        timeout_s=values.get("timeout_s", settings.request_timeout_s),
        **{name: values[name] for name in _PASSED if name in values},
    )
    turn = await prepare_turn(
        request,
        messages,
        service,
        settings,
        tools=tools,
        template_values={**template_values, **read_template_kwargs(values)},
        max_tokens=values.get("max_tokens"),
        one_call=one_call,
    )
    return MessageCall(
        id=request.request_id,
        turn=turn,
        stream=values.get("stream", False),
        thinking=enabled,
        thinking_text=thinking.get("display") != "omitted",
    )


def _read_tools(values: dict[str, Any]) -> tuple[ToolUse, bool]:
    """The tools in the form of chat templates and their mode; whether only the first call is returned. Raises RequestError."""
    tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(values.get("tools", ()))]
    choice = TOOL_CHOICE.check(values.get("tool_choice", {}), prefix="tool_choice.")
    kind, one_call = choice.get("type", "auto"), choice.get("disable_parallel_tool_use", False)
    if kind == "none" or (not tools and kind == "auto"):
        return ToolUse([], "none"), one_call
    if not tools:
        raise RequestError("tool_choice.type", kind, "there are no tools")
    if kind != "tool":
        return ToolUse(tools, "required" if kind == "any" else "auto"), one_call
    use = ToolUse(tools, "forced", choice.get("name", ""))
    if use.forced not in use.schemas:
        raise RequestError("tool_choice.name", choice.get("name"), f"it must name one of the tools: {', '.join(sorted(use.schemas))}")
    return use, one_call


def _read_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """The tool in the form of OpenAI's API. Raises RequestError for a tool that the client does not run or describe."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        limit = "only tools that the client runs and describes are supported"
        raise RequestError(f"{field}.type", kind, limit, cure='Use {"name": …, "description": …, "input_schema": …}.')
    TOOL.check(tool, prefix=f"{field}.")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), field=field, schema_name="input_schema")


def _guide(form: dict[str, Any] | None) -> Guide | None:
    """The grammar of output_config.format. Raises RequestError."""
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RequestError("output_config.format", form, 'it must be {"type": "json_schema", "schema": {…}}')
    return Guide("json_schema", msgspec.json.encode(form["schema"]).decode())
