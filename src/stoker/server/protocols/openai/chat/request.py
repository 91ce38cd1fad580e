"""A chat request, checked, with its prompt rendered and tokenized."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import FinishReason, GenerationRequest
from stoker.frontend.prompts import encode_prompt, truncate_prompt
from stoker.frontend.service import Service
from stoker.server.protocols.common.chat.tools import ToolUse
from stoker.server.protocols.common.guides import read_guide
from stoker.server.protocols.common.parsers.answer import AnswerParser
from stoker.server.protocols.common.parsers.reasoning import OPEN, REASONING_PARSERS
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.call import OpenAICall, read_openai_call
from stoker.server.protocols.openai.chat.tool_choice import read_tools
from stoker.server.protocols.openai.fields import MAX_TOKENS
from stoker.server.settings import ServerSettings

_RESERVED_VALUES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "max_chars")

_SWITCHES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")


class CallArguments(dict[str, Any]):
    """The arguments of an earlier tool call as an object, which most templates expect. Concatenation with text uses the JSON text.

    DeepSeek's templates concatenate the arguments, as they are text in OpenAI's API.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class ChatCall(msgspec.Struct):
    """A checked request whose prompt is tokenized."""

    common: OpenAICall
    service: Service
    request: GenerationRequest
    tools: ToolUse
    settings: ServerSettings
    opened: bool  # the prompt ends with <think>
    role: str  # of the answer
    echo: str  # text of the last message that precedes the answer
    head: dict[str, Any]  # members that every response object starts with

    @property
    def num_top(self) -> int | None:
        """Number of candidates whose log-probabilities the response contains; None: it contains no log-probabilities."""
        return self.common.values.get("top_logprobs", 0) if self.common.values.get("logprobs") else None

    @property
    def parsed(self) -> bool:
        """Whether the text of the answer is parsed for reasoning or tool calls."""
        return self.settings.reasoning_parser is not None or self.tools.mode != "none"

    def parser(self) -> AnswerParser:
        """A new parser for one choice."""
        name = self.settings.reasoning_parser
        reasoning = REASONING_PARSERS.get(name)(self.opened) if name is not None else None
        one_call = self.common.values.get("parallel_tool_calls") is False
        return AnswerParser(reasoning, self.tools.parser(self.settings.tool_parser), one_call=one_call)

    def finish_reason(self, reason: FinishReason, num_calls: int) -> str:
        has_calls = num_calls > 0 and reason is FinishReason.STOP and self.tools.mode != "forced"
        return "tool_calls" if has_calls else wire.FINISH[reason]


async def read_chat_call(body: dict[str, Any], service: Service, settings: ServerSettings) -> ChatCall:
    """Check a request body, render its messages and tokenize the prompt. Raises RequestError."""
    # The default of max_tokens depends on the length of the prompt and is set below.
    common = read_openai_call("chat", body, service, settings, max_tokens=MAX_TOKENS)
    values = common.values
    tools = read_tools(values)
    prompt = service.render_chat(_messages(values.get("messages")), **_template_values(values, tools))
    ids = await encode_prompt(service, prompt, add_special_tokens=values.get("add_special_tokens", False))
    request = common.generation(ids, None)
    request.prompt = ids = truncate_prompt(ids, request.truncate_prompt_tokens, request.truncation_side)
    request.params = msgspec.structs.replace(common.params, **_params(values, tools, len(ids), service, settings))
    head = {"id": f"chatcmpl-{common.request_id}", "object": "chat.completion", "created": int(time.time()), "model": service.model_name}
    role, echo = _role_and_echo(values)
    call = ChatCall(common, service, request, tools, settings, prompt.rstrip().endswith(OPEN), role, echo, head)
    parser = tools.parser(settings.tool_parser)
    if parser is not None and parser.needs_special_tokens:
        request.params = msgspec.structs.replace(request.params, skip_special_tokens=False)
    return call


def _params(values: dict[str, Any], tools: ToolUse, num_prompt: int, service: Service, settings: ServerSettings) -> dict[str, Any]:
    """SamplingParams fields that only chat requests have, or whose default depends on the prompt."""
    params: dict[str, Any] = {"max_tokens": _max_tokens(values, num_prompt, service, settings)}
    if "top_logprobs" in values and not values.get("logprobs"):
        raise RequestError("top_logprobs", values["top_logprobs"], "it requires logprobs=true")
    if values.get("logprobs"):
        params["logprobs"] = values.get("top_logprobs", 0)
    if (guide := tools.guide()) is not None:
        if read_guide(values) is not None:
            raise RequestError(
                "tool_choice", values["tool_choice"], "it constrains the answer, and another field does too", cure="Use one of them."
            )
        params["guide"] = guide
    return params


def _max_tokens(values: dict[str, Any], num_prompt: int, service: Service, settings: ServerSettings) -> int:
    """max_tokens or max_completion_tokens; by default, as many tokens as fit the engine after the prompt."""
    limits: set[int] = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(limits) > 1:
        raise RequestError(
            "max_completion_tokens", values["max_completion_tokens"], f"max_tokens is {values['max_tokens']}", cure="Use one of them."
        )
    if limits:
        return limits.pop()
    if settings.default_max_tokens is not None:
        return settings.default_max_tokens
    return max(1, min(service.info.limits.max_output_len, service.max_seq_len - num_prompt))


def _template_values(values: dict[str, Any], tools: ToolUse) -> dict[str, Any]:
    """The variables of the chat template. Raises RequestError for a reserved name in chat_template_kwargs."""
    extra = values.get("chat_template_kwargs", {})
    for name in _RESERVED_VALUES:
        if name in extra:
            raise RequestError(
                f"chat_template_kwargs.{name}", extra[name], "it is not a switch of the template", cure=f"Set {name} in the request itself."
            )
    template_values: dict[str, Any] = {name: values[name] for name in _SWITCHES if name in values}
    if values.get("continue_final_message"):
        template_values.setdefault("add_generation_prompt", False)
    if "documents" in values:
        template_values["documents"] = list(values["documents"])
    return {**extra, **template_values, "tools": tools.tools or None}


def _role_and_echo(values: dict[str, Any]) -> tuple[str, str]:
    """The role of the answer, and the text of the last message if `echo` is set and the message has this role.

    Without a generation prompt, the role is that of the last message. The messages have been checked.
    """
    last = values["messages"][-1]
    continued = values.get("continue_final_message", False)
    role = "assistant" if values.get("add_generation_prompt", not continued) else last["role"]
    if not values.get("echo") or last["role"] != role:
        return role, ""
    content = last.get("content") or ""
    return role, content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _messages(messages: Any) -> Any:
    """The messages for the chat template, which expects the arguments of earlier tool calls as objects instead of JSON text.

    The service checks everything else.
    """
    if messages is None:
        raise RequestError("messages", None, "it is missing")
    return [_with_parsed_arguments(message) for message in messages] if isinstance(messages, list) else messages


def _with_parsed_arguments(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") != "assistant" or not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_parse_arguments(call) for call in message["tool_calls"]]}


def _parse_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object; unchanged if they are not the JSON of an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": CallArguments(arguments, function["arguments"])}}
