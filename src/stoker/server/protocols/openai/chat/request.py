"""A chat request, checked, with its prompt rendered and tokenized."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import FinishReason
from stoker.frontend.service import Service
from stoker.server.protocols.common.chat.template_values import read_template_kwargs
from stoker.server.protocols.common.chat.turn import ChatTurn, prepare_turn
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.call import OpenAICall, read_openai_call
from stoker.server.protocols.openai.chat.tool_choice import read_tools
from stoker.server.protocols.openai.fields import MAX_TOKENS
from stoker.server.settings import ServerSettings

_SWITCHES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")


class ChatCall(ChatTurn, kw_only=True):
    """A checked request whose prompt is tokenized."""

    common: OpenAICall
    role: str  # of the answer
    echo: str  # text of the last message that precedes the answer
    head: dict[str, Any]  # members that every response object starts with

    @property
    def num_top(self) -> int | None:
        """Number of candidates whose log-probabilities the response contains; None: it contains no log-probabilities."""
        return self.common.values.get("top_logprobs", 0) if self.common.values.get("logprobs") else None

    def finish_reason(self, reason: FinishReason, num_calls: int) -> str:
        """OpenAI's finish_reason. "tool_calls" if the answer stopped by itself and has calls, unless the request forced the call."""
        has_calls = num_calls > 0 and reason is FinishReason.STOP and self.tools.mode != "forced"
        return "tool_calls" if has_calls else wire.FINISH[reason]


async def read_chat_call(body: dict[str, Any], service: Service, settings: ServerSettings) -> ChatCall:
    """Check a request body, render its messages and tokenize the prompt. Raises RequestError."""
    common = read_openai_call("chat", body, service, settings, max_tokens=MAX_TOKENS)  # prepare_turn sets the default
    values = common.values
    tools = read_tools(values)
    messages = values.get("messages")
    if not isinstance(messages, list):
        raise RequestError("messages", messages, "it is missing" if messages is None else "it must be a list of at least one message")
    common.params = msgspec.structs.replace(common.params, **_logprobs_params(values))
    request = common.generation(
        "", None, add_special_tokens=values.get("add_special_tokens", False), prediction=_prediction(values.get("prediction"))
    )
    turn = await prepare_turn(
        request,
        messages,
        service,
        settings,
        tools=tools,
        template_values=_template_values(values),
        max_tokens=_max_tokens(values),
        one_call=values.get("parallel_tool_calls") is False,
    )
    head = {"id": f"chatcmpl-{common.request_id}", "object": "chat.completion", "created": int(time.time()), "model": service.model_name}
    role, echo = _role_and_echo(values)
    return ChatCall(**msgspec.structs.asdict(turn), common=common, role=role, echo=echo, head=head)


def _logprobs_params(values: dict[str, Any]) -> dict[str, Any]:
    """The SamplingParams field that logprobs and top_logprobs determine; empty without logprobs.

    Raises RequestError for top_logprobs alone.
    """
    if "top_logprobs" in values and not values.get("logprobs"):
        raise RequestError("top_logprobs", values["top_logprobs"], "it requires logprobs=true")
    return {"logprobs": values.get("top_logprobs", 0)} if values.get("logprobs") else {}


def _prediction(value: dict[str, Any] | None) -> str:
    """The text of `prediction`: its content is a string or a list of text parts. Raises RequestError."""
    if value is None:
        return ""
    content = value.get("content")
    parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    is_text = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )
    if value.get("type") != "content" or not is_text or set(value) - {"type", "content"}:
        limit = 'it must be {"type": "content", "content": …} with a string or a list of text parts'
        raise RequestError("prediction", value, limit)
    return "".join(part["text"] for part in parts)


def _max_tokens(values: dict[str, Any]) -> int | None:
    """max_tokens or max_completion_tokens; None without them. Raises RequestError if they differ."""
    limits: set[int] = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(limits) > 1:
        raise RequestError(
            "max_completion_tokens", values["max_completion_tokens"], f"max_tokens is {values['max_tokens']}", cure="Use one of them."
        )
    return limits.pop() if limits else None


def _template_values(values: dict[str, Any]) -> dict[str, Any]:
    """The variables of the chat template. Raises RequestError for a reserved name in chat_template_kwargs."""
    template_values: dict[str, Any] = {name: values[name] for name in _SWITCHES if name in values}
    if values.get("continue_final_message"):
        template_values.setdefault("add_generation_prompt", False)
    if "documents" in values:
        template_values["documents"] = list(values["documents"])
    return {**read_template_kwargs(values), **template_values}


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
