"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import Delta, FinishReason, GenerationRequest, TokenLogprobs, Usage
from stoker.frontend.service import Choice, Service
from stoker.server.errors import describe, sequence_error
from stoker.server.exchange import Exchange
from stoker.server.protocol import Context
from stoker.server.protocols.openai import wire
from stoker.server.protocols.openai.answer import AnswerParser, Parts
from stoker.server.protocols.openai.asked import Asked, read
from stoker.server.protocols.openai.chunks import DONE, Chunks, event
from stoker.server.protocols.openai.guides import read_guide
from stoker.server.protocols.openai.prompts import encode
from stoker.server.protocols.openai.reasoning import OPEN, REASONING_PARSERS
from stoker.server.protocols.openai.tool_choice import ToolUse, read_tools
from stoker.server.schemas.settings import ServerSettings

_OWN_VALUES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "max_chars")

_SWITCHES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")


class Call(msgspec.Struct):
    """One request, its prompt tokenized."""

    asked: Asked
    service: Service
    request: GenerationRequest
    tools: ToolUse
    settings: ServerSettings
    opened: bool  # the prompt ends inside reasoning
    head: dict[str, Any]

    @property
    def num_top(self) -> int | None:
        """Log-probabilities to show besides each token's own; None: none are wanted."""
        return self.asked.values.get("top_logprobs", 0) if self.asked.values.get("logprobs") else None

    @property
    def parsed(self) -> bool:
        return self.settings.reasoning_parser is not None or self.tools.mode != "none"

    def parser(self) -> AnswerParser:
        name = self.settings.reasoning_parser
        reasoning = REASONING_PARSERS.get(name)(self.opened) if name is not None else None
        one_call = self.asked.values.get("parallel_tool_calls") is False
        return AnswerParser(reasoning, self.tools.parser(self.settings.tool_parser), one_call=one_call)

    def finish(self, reason: FinishReason, num_calls: int) -> str:
        called = num_calls > 0 and reason is FinishReason.STOP and self.tools.mode != "forced"
        return "tool_calls" if called else wire.FINISH[reason]


async def chat(exchange: Exchange, context: Context, service: Service, body: dict[str, Any]) -> None:
    """Answer one request, whole or streamed."""
    async with exchange.attended():
        call = await _read(body, service, context.settings)
        if call.asked.stream:
            await _Stream(exchange, call).run()
        else:
            await exchange.respond(200, await _whole(call))


async def _read(body: dict[str, Any], service: Service, settings: ServerSettings) -> Call:
    asked = read("chat", body, service, settings)
    values = asked.values
    tools = read_tools(values)
    prompt = service.render_chat(_messages(values.get("messages")), **_template_values(values, tools))
    ids = await encode(service, prompt, add_special_tokens=values.get("add_special_tokens", False))
    request = asked.generation(ids, None)
    if request.truncate_prompt_tokens is not None:
        request.prompt = ids = ids[-request.truncate_prompt_tokens :]
    request.params = msgspec.structs.replace(asked.params, **_params(values, tools, len(ids), service, settings))
    head = {"id": f"chatcmpl-{asked.request_id}", "object": "chat.completion", "created": int(time.time()), "model": service.model_name}
    call = Call(asked, service, request, tools, settings, prompt.rstrip().endswith(OPEN), head)
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
                "tool_choice", values["tool_choice"], "the call is the whole answer, and another format is asked too", cure="Use one."
            )
        params["guide"] = guide
    return params


def _max_tokens(values: dict[str, Any], num_prompt: int, service: Service, settings: ServerSettings) -> int:
    """What was asked; without it, whatever fits the engine."""
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
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


async def _whole(call: Call) -> bytes:
    completion = await call.service.complete(call.request)
    body = {**call.head, "choices": [_choice(call, choice) for choice in completion.choices], "usage": wire.usage_object(completion.usage)}
    if "prompt_logprobs" in call.asked.values:
        body["prompt_logprobs"] = wire.prompt_logprobs(call.service, completion.prompt_logprobs or [])
    return wire.encode(body)


def _choice(call: Call, choice: Choice) -> dict[str, Any]:
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=call.service.ready)
    parts = call.parser().push(choice.text, last=True) if call.parsed else Parts(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": parts.content or (None if parts.calls or parts.reasoning else "")}
    if call.settings.reasoning_parser is not None:
        message["reasoning_content"] = parts.reasoning or None
    if parts.calls:
        message["tool_calls"] = [_tool_call(tool) for tool in parts.calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if call.num_top is None else wire.chat_logprobs(call.service, choice.logprobs, call.num_top),
        "finish_reason": call.finish(choice.finish_reason, len(parts.calls)),
        "stop_reason": wire.stop_reason(choice.finish_reason, choice.stop_reason),
    }


def _tool_call(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _Stream:
    """One streamed answer. Everything that one wake-up brings leaves in one piece."""

    def __init__(self, exchange: Exchange, call: Call) -> None:
        self._exchange = exchange
        self._call = call
        self._options = call.asked.options
        head = {**call.head, "object": "chat.completion.chunk"}
        self._chunks = Chunks(head, chat=True, include_usage=self._options.include_usage)
        self._plain = not (call.parsed or call.num_top is not None or self._options.continuous_usage_stats)
        self._parsers = [call.parser() if call.parsed else AnswerParser(None, None, one_call=False) for _ in range(call.request.params.n)]
        self._scores: list[list[TokenLogprobs]] = [[] for _ in self._parsers]  # of tokens whose text is held back
        self._usage = Usage()

    async def run(self) -> None:
        async with aclosing(self._call.service.stream(self._call.request)) as batches:
            async for deltas in batches:
                data = b"".join([self._chunk(delta) for delta in deltas])
                if not self._exchange.started:
                    data = b"".join([self._role(i) for i in range(len(self._parsers))]) + data
                    await self._exchange.open_stream()
                if data:
                    await self._exchange.send(data)
        if self._options.include_usage:
            await self._exchange.send(self._chunks.usage(self._usage))
        await self._exchange.send(DONE)
        await self._exchange.close_stream()

    def _chunk(self, delta: Delta) -> bytes:
        if self._plain and delta.finish_reason is None and delta.usage is None:
            return self._chunks.text(delta.index, delta.text) if delta.text else b""
        wire.count(self._usage, delta)
        if delta.finish_reason is FinishReason.ERROR:
            failure = describe(sequence_error(delta.error, ready=self._call.service.ready))
            return event({"error": wire.failure_object(failure)})
        return self._parsed(delta)

    def _parsed(self, delta: Delta) -> bytes:
        """A chunk with whatever is certain now; none while all is held back."""
        parser, scores = self._parsers[delta.index], self._scores[delta.index]
        scores += delta.logprobs
        num_calls = parser.num_calls
        parts = parser.push(delta.text, last=delta.finish_reason is not None)
        if not parts and delta.finish_reason is None and not self._options.continuous_usage_stats:
            return b""
        logprobs = None
        if self._call.num_top is not None and (parts or delta.finish_reason is not None):
            logprobs = wire.chat_logprobs(self._call.service, scores, self._call.num_top)
            scores.clear()
        return self._choice(delta, _delta(parts, num_calls), logprobs)

    def _choice(self, delta: Delta, shown: dict[str, Any], logprobs: dict[str, Any] | None) -> bytes:
        reason = delta.finish_reason
        choice: dict[str, Any] = {"index": delta.index, "delta": shown, "logprobs": logprobs, "finish_reason": None}
        if reason is not None:
            choice["finish_reason"] = self._call.finish(reason, self._parsers[delta.index].num_calls)
            choice["stop_reason"] = wire.stop_reason(reason, delta.stop_reason)
        return self._chunks.choice(choice, self._usage if self._options.continuous_usage_stats else None)

    def _role(self, index: int) -> bytes:
        role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunks.choice(role, Usage(self._usage.prompt_tokens) if self._options.continuous_usage_stats else None)


def _delta(parts: Parts, num_calls: int) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if parts.reasoning:
        shown["reasoning_content"] = parts.reasoning
    if parts.content:
        shown["content"] = parts.content
    if parts.calls:
        shown["tool_calls"] = [{"index": num_calls + i, **_tool_call(call)} for i, call in enumerate(parts.calls)]
    return shown
