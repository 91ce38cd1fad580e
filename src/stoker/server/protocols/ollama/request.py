"""Requests of POST /api/chat and /api/generate, checked, with their prompts tokenized."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import GenerationRequest, Guide, SamplingParams
from stoker.frontend.service import Service
from stoker.server.protocols.common.chat.template_values import thinking_switches
from stoker.server.protocols.common.chat.tools import ToolUse, function_tool
from stoker.server.protocols.common.chat.turn import ChatTurn, prepare_raw_turn, prepare_turn
from stoker.server.protocols.common.guides import OBJECT_GUIDE
from stoker.server.protocols.common.parsers.selection import with_parsers
from stoker.server.protocols.ollama.fields import MAX_TOKENS, OPTIONS
from stoker.server.protocols.ollama.messages import read_messages
from stoker.server.settings import ServerSettings

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # of Ollama
_TARGETS = tuple(OPTIONS.targets().items())
_EFFORTS = ("low", "medium", "high")


class OllamaCall(msgspec.Struct, kw_only=True):
    """A checked request. Without a `turn`, nothing is generated."""

    model: str  # as the client wrote it
    turn: ChatTurn | None
    stream: bool
    context: bool = False  # the response contains the token ids of prompt and answer

    @property
    def num_top(self) -> int | None:
        """Number of candidates whose log-probabilities the response contains; None: it contains no log-probabilities."""
        return self.turn.request.params.logprobs if self.turn is not None else None


async def read_chat_call(values: dict[str, Any], service: Service, settings: ServerSettings) -> OllamaCall:
    """Check the fields of /api/chat, which have the types of the table. Raises RequestError."""
    call = OllamaCall(model=values.get("model", service.model_name), turn=None, stream=values.get("stream", True))
    if values.get("messages"):
        tools = [_read_tool(tool, f"tools[{i}].function") for i, tool in enumerate(values.get("tools", ()))]
        use = ToolUse(tools, "auto" if tools else "none")
        call.turn = await _prepare(values, read_messages(values["messages"]), use, service, settings)
    return call


async def read_generate_call(values: dict[str, Any], service: Service, settings: ServerSettings) -> OllamaCall:
    """Check the fields of /api/generate, which have the types of the table. Raises RequestError."""
    raw = values.get("raw", False) or service.chat_template is None
    call = OllamaCall(model=values.get("model", service.model_name), turn=None, stream=values.get("stream", True), context=not raw)
    prompt = values.get("prompt", "")
    if not prompt:
        return call
    if raw:
        text = "\n\n".join(part for part in (values.get("system"), prompt) if part)
        request = _request(values, settings, add_special_tokens=settings.add_special_tokens)
        call.turn = await prepare_raw_turn(request, text, service, settings, max_tokens=_max_tokens(values))
    else:
        system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
        messages = [*system, {"role": "user", "content": prompt}]
        call.turn = await _prepare(values, messages, ToolUse([], "none"), service, settings)
    if "context" in values:
        call.turn.request.prompt = [*values["context"], *call.turn.request.prompt]  # type: ignore[list-item]  # it is token ids
    return call


async def _prepare(
    values: dict[str, Any], messages: list[dict[str, Any]], tools: ToolUse, service: Service, settings: ServerSettings
) -> ChatTurn:
    """The checked request with its prompt rendered from the messages and tokenized. Raises RequestError."""
    return await prepare_turn(
        _request(values, settings, add_special_tokens=False),
        messages,
        service,
        settings,
        tools=tools,
        template_values=_template_values(values, with_parsers(settings, service)),
        max_tokens=_max_tokens(values),
    )


def _request(values: dict[str, Any], settings: ServerSettings, *, add_special_tokens: bool) -> GenerationRequest:
    """The request without its prompt."""
    options = OPTIONS.check(values.get("options", {}), prefix="options.")
    params: dict[str, Any] = {**_DEFAULTS, "skip_special_tokens": settings.skip_special_tokens, "guide": _guide(values.get("format"))}
    params |= {target: options[name] for name, target in _TARGETS if name in options}
    if values.get("logprobs"):
        params["logprobs"] = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise RequestError("top_logprobs", values["top_logprobs"], "it requires logprobs=true")
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt="",
        params=SamplingParams(max_tokens=MAX_TOKENS, **params),
        add_special_tokens=add_special_tokens,
        timeout_s=settings.request_timeout_s,
    )


def _max_tokens(values: dict[str, Any]) -> int | None:
    """The option num_predict. None if absent, or if it is not positive, which means no limit."""
    limit = OPTIONS.check(values.get("options", {}), prefix="options.").get("num_predict", 0)
    return limit if limit > 0 else None


def _guide(form: Any) -> Guide | None:
    """The grammar of the field format. Raises RequestError."""
    if form is None or form == "":
        return None
    if form == "json":
        return OBJECT_GUIDE
    if not isinstance(form, dict):
        raise RequestError("format", form, 'it must be "json" or a JSON schema')
    return Guide("json_schema", msgspec.json.encode(form).decode())


def _template_values(values: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """The switches of the chat template that the field think sets. Raises RequestError."""
    think = values.get("think")
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in _EFFORTS:
        raise RequestError("think", think, f"it must be true, false or one of {', '.join(_EFFORTS)}")
    if think and settings.reasoning_parser is None:
        raise RequestError("think", think, "the server does not separate thinking", cure="Start it with --reasoning-parser.")
    return {**thinking_switches(bool(think)), **({"reasoning_effort": think} if think in _EFFORTS else {})}


def _read_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """The tool in the form of OpenAI's API. Raises RequestError if it is not a function."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError(field, function, 'a tool must be {"type": "function", "function": {…}}')
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return function_tool(function.get("name"), function.get("description"), parameters, field=field, schema_name="parameters")
