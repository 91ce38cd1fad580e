"""A chat request: checked, its prompt rendered and tokenized."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import FinishReason, GenerationRequest
from stoker.frontend.prompts import encode_prompt, truncate_prompt
from stoker.frontend.service import Service
from stoker.server.protocols.common.guides import read_guide
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.call import OpenAICall, read_openai_call
from stoker.server.protocols.openai.chat.tool_choice import ToolUse, read_tools
from stoker.server.protocols.openai.fields import MAX_TOKENS
from stoker.server.protocols.openai.parsers.answer import AnswerParser
from stoker.server.protocols.openai.parsers.reasoning import OPEN, REASONING_PARSERS
from stoker.server.settings import ServerSettings

_OWN_VALUES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "max_chars")

_SWITCHES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")


class ChatCall(msgspec.Struct):
    """One request, its prompt tokenized."""

    common: OpenAICall
    service: Service
    request: GenerationRequest
    tools: ToolUse
    settings: ServerSettings
    opened: bool  # the prompt ends inside reasoning
    head: dict[str, Any]

    @property
    def num_top(self) -> int | None:
        """Log-probabilities to show besides each token's own; None: none are wanted."""
        return self.common.values.get("top_logprobs", 0) if self.common.values.get("logprobs") else None

    @property
    def parsed(self) -> bool:
        return self.settings.reasoning_parser is not None or self.tools.mode != "none"

    def parser(self) -> AnswerParser:
        name = self.settings.reasoning_parser
        reasoning = REASONING_PARSERS.get(name)(self.opened) if name is not None else None
        one_call = self.common.values.get("parallel_tool_calls") is False
        return AnswerParser(reasoning, self.tools.parser(self.settings.tool_parser), one_call=one_call)

    def finish(self, reason: FinishReason, num_calls: int) -> str:
        called = num_calls > 0 and reason is FinishReason.STOP and self.tools.mode != "forced"
        return "tool_calls" if called else wire.FINISH[reason]


async def read_chat_call(body: dict[str, Any], service: Service, settings: ServerSettings) -> ChatCall:
    common = read_openai_call("chat", body, service, settings, max_tokens=MAX_TOKENS)  # until the prompt is known
    values = common.values
    tools = read_tools(values)
    prompt = service.render_chat(_messages(values.get("messages")), **_template_values(values, tools))
    ids = await encode_prompt(service, prompt, add_special_tokens=values.get("add_special_tokens", False))
    request = common.generation(ids, None)
    request.prompt = ids = truncate_prompt(ids, request.truncate_prompt_tokens)
    request.params = msgspec.structs.replace(common.params, **_params(values, tools, len(ids), service, settings))
    head = {"id": f"chatcmpl-{common.request_id}", "object": "chat.completion", "created": int(time.time()), "model": service.model_name}
    call = ChatCall(common, service, request, tools, settings, prompt.rstrip().endswith(OPEN), head)
    parser = tools.parser(settings.tool_parser)
    if parser is not None and parser.needs_special_tokens:
        request.params = msgspec.structs.replace(request.params, skip_special_tokens=False)
    return call


def _params(values: dict[str, Any], tools: ToolUse, num_prompt: int, service: Service, settings: ServerSettings) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": _max_tokens(values, num_prompt, service, settings)}
    if "top_logprobs" in values and not values.get("logprobs"):
        raise RequestError("top_logprobs", values["top_logprobs"], "it needs logprobs=true")
    if values.get("logprobs"):
        params["logprobs"] = values.get("top_logprobs", 0)
    if (guide := tools.guide()) is not None:
        if read_guide(values) is not None:
            raise RequestError(
                "tool_choice", values["tool_choice"], "the call is the whole answer, and another format is common too", cure="Use one."
            )
        params["guide"] = guide
    return params


def _max_tokens(values: dict[str, Any], num_prompt: int, service: Service, settings: ServerSettings) -> int:
    """What was common; without it, whatever fits the engine."""
    both = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(both) > 1:
        raise RequestError(
            "max_completion_tokens", values["max_completion_tokens"], f"max_tokens is {values['max_tokens']}", cure="Use one of them."
        )
    if both:
        return both.pop()
    if settings.default_max_tokens is not None:
        return settings.default_max_tokens
    return max(1, min(service.info.limits.max_output_len, service.max_seq_len - num_prompt))


def _template_values(values: dict[str, Any], tools: ToolUse) -> dict[str, Any]:
    extra = values.get("chat_template_kwargs", {})
    for name in _OWN_VALUES:
        if name in extra:
            raise RequestError(
                f"chat_template_kwargs.{name}", extra[name], "it is not a switch of the template", cure=f"Set {name} in the request itself."
            )
    given: dict[str, Any] = {
        name: values[name] for name in ("add_generation_prompt", "continue_final_message", "reasoning_effort") if name in values
    }
    if "documents" in values:
        given["documents"] = list(values["documents"])
    return {**extra, **given, "tools": tools.tools or None}


def _messages(messages: Any) -> Any:
    """Templates want the arguments of earlier calls as objects; on the wire they are JSON text. The service checks the rest."""
    if messages is None:
        raise RequestError("messages", None, "it is missing")
    return [_with_objects(message) for message in messages] if isinstance(messages, list) else messages


def _with_objects(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") != "assistant" or not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
