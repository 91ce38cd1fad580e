"""Responses to requests of the schema {"messages"} with rolling batching.

The request has OpenAI's fields, and the response has the format of the DJL server.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.base.errors import RequestError
from stoker.base.types import Delta, FinishReason, TokenLogprobs
from stoker.frontend.service import Choice, Service
from stoker.server.errors import sequence_error
from stoker.server.protocols.common.parsers.answer import AnswerParser
from stoker.server.protocols.openai import response_json as wire
from stoker.server.protocols.openai.call import client_error
from stoker.server.protocols.openai.chat.message import delta_object, message_object
from stoker.server.protocols.openai.chat.request import ChatCall, read_chat_call
from stoker.server.protocols.sagemaker.dialects import encode
from stoker.server.protocols.sagemaker.reply import JSON_LINES, Reply
from stoker.server.protocols.sagemaker.tokens import finish_name
from stoker.server.settings import ServerSettings

_OPENAI_ONLY = {"echo": False, "return_token_ids": False, "detokenize": True}  # field → the value that requests nothing


async def chat(reply: Reply, service: Service, body: dict[str, Any], settings: ServerSettings) -> None:
    """Generate and respond. As in the DJL server, `model` is ignored, because the path selects the model. Raises RequestError."""
    try:
        await _chat(reply, service, body, settings)
    except RequestError as error:
        raise client_error(error, body) from None


async def _chat(reply: Reply, service: Service, body: dict[str, Any], settings: ServerSettings) -> None:
    """Check the request, and respond whole or streamed. Raises RequestError, also for fields that only OpenAI's format supports."""
    call = await read_chat_call({name: value for name, value in body.items() if name != "model"}, service, settings)
    for name, harmless in _OPENAI_ONLY.items():
        if call.common.values.get(name, harmless) is not harmless:
            raise RequestError(name, call.common.values[name], "responses of this format have no member for it", cure="Leave it out.")
    if call.common.stream:
        await _Stream(reply, call).run()
    else:
        await reply.whole(await _whole(call))


async def _whole(call: ChatCall) -> bytes:
    """Generate all choices. The encoded response."""
    completion = await call.service.complete(call.request)
    usage = wire.usage_object(completion.usage)
    del usage["prompt_tokens_details"]
    head = {name: call.head[name] for name in ("id", "object", "created")}
    return encode({**head, "choices": [_choice(call, choice) for choice in completion.choices], "usage": usage}).encode()


def _choice(call: ChatCall, choice: Choice) -> dict[str, Any]:
    """The object of a choice. Raises the error of a failed sequence."""
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=call.service.ready)
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    num_calls = 0
    if call.parsed:
        parser = call.parser()
        message = message_object(parser.push(choice.text, last=True), reasoning=call.settings.reasoning_parser is not None)
        num_calls = parser.num_calls
    finish_reason = _finish_reason(call, choice, num_calls)
    return {"index": choice.index, "message": message, "logprobs": _logprobs(call, choice.logprobs), "finish_reason": finish_reason}


def _finish_reason(call: ChatCall, ended: Delta | Choice, num_calls: int) -> str:
    """The finish reason in LMI's words. tool_calls if the answer has calls."""
    assert ended.finish_reason is not None
    named = call.finish_reason(ended.finish_reason, num_calls)
    return named if named == "tool_calls" else finish_name(ended.finish_reason, ended.stop_reason)


def _logprobs(call: ChatCall, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
    """The member `logprobs`. None if it is not requested."""
    if call.num_top is None:
        return None
    return {"content": wire.chat_logprobs(call.service, entries, call.num_top)["content"]}


class _Stream:
    """A streamed response: one line per token. With a tool or reasoning parser, a line is written when the parser returns something."""

    def __init__(self, reply: Reply, call: ChatCall) -> None:
        self._reply, self._call = reply, call
        self._head = {"id": call.head["id"], "object": "chat.completion.chunk", "created": call.head["created"]}
        self._parsers: dict[int, AnswerParser] = {}
        self._scores: dict[int, list[TokenLogprobs]] = {}  # log-probabilities of tokens whose text the parser holds back

    async def run(self) -> None:
        """Generate, and send lines as deltas arrive.

        A failure before the first line is raised; a later one ends the stream with an error.
        """
        async with aclosing(self._call.service.stream(self._call.request)) as batches:
            async for deltas in batches:
                failed = next((delta for delta in deltas if delta.finish_reason is FinishReason.ERROR), None)
                if failed is not None:
                    error = sequence_error(failed.error, ready=self._call.service.ready)
                    if not self._reply.http.started:
                        raise error
                    await self._reply.fail(error, JSON_LINES)
                    return
                if not self._reply.http.started:
                    await self._reply.open(JSON_LINES)
                if lines := "".join([self._line(delta) for delta in deltas]):
                    await self._reply.send(lines.encode())
        await self._reply.close()

    def _line(self, delta: Delta) -> str:
        """The line of one delta; empty while the parser holds all text back."""
        started = delta.index in self._parsers
        if not started:
            self._parsers[delta.index] = self._call.parser()
        parser = self._parsers[delta.index]
        scores = self._scores.setdefault(delta.index, [])
        scores += delta.logprobs
        new: dict[str, Any] = {"content": delta.text}
        if self._call.parsed:
            parts = parser.push(delta.text, last=delta.finish_reason is not None)
            if started and not parts and delta.finish_reason is None:
                return ""
            new = delta_object(parts)
        new |= {} if started else {"role": "assistant"}
        logprobs = _logprobs(self._call, scores)
        scores.clear()
        finish_reason = None if delta.finish_reason is None else _finish_reason(self._call, delta, parser.num_calls)
        choice = {"index": delta.index, "delta": new, "logprobs": logprobs, "finish_reason": finish_reason}
        return encode({**self._head, "choices": [choice]}) + "\n"
