"""Responses of /api/chat and /api/generate: one object, or one object per line."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.types import FinishReason, TokenLogprobs
from stoker.server.errors import describe
from stoker.server.http.request_context import RequestContext
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.blocks import Block, BlockEvent
from stoker.server.protocols.common.chat.send_answer import send_answer
from stoker.server.protocols.common.logprobs import scored_token
from stoker.server.protocols.ollama.request import OllamaCall

LINES = b"application/x-ndjson"
encode = msgspec.json.encode
Parts = dict[str, Any]  # members of a message: content, thinking, tool_calls
Shape = Callable[[Parts], dict[str, Any]]  # the members of a response that contain the parts of an answer


def chat_members(parts: Parts) -> dict[str, Any]:
    """The members of a response of /api/chat."""
    return {"message": {"role": "assistant", "content": "", **parts}}


def generate_members(parts: Parts) -> dict[str, Any]:
    """The members of a response of /api/generate."""
    thinking = {"thinking": parts["thinking"]} if "thinking" in parts else {}
    return {"response": parts.get("content", ""), **thinking}


async def respond(http: RequestContext, call: OllamaCall, shape: Shape) -> None:
    """Generate and respond, whole or streamed. Raises StokerError before the first byte."""
    if call.turn is None:
        await _respond_once(http, call, {**_head(call), **shape({}), "done": True, "done_reason": "load"})
        return
    run = _Run(call, shape)
    if call.stream:
        await run.stream(http)
    else:
        await http.respond(200, encode(await run.whole()))


async def _respond_once(http: RequestContext, call: OllamaCall, body: dict[str, Any]) -> None:
    """Respond with one object: as a line if the client expects a stream, otherwise as a body."""
    await http.respond(200, encode(body) + (b"\n" if call.stream else b""), LINES if call.stream else b"application/json")


class _Run:
    """One response. Durations are in nanoseconds."""

    def __init__(self, call: OllamaCall, shape: Shape) -> None:
        assert call.turn is not None
        self._call, self._turn, self._shape = call, call.turn, shape
        self._answer = Answer(call.turn)
        self._started = time.monotonic_ns()
        self._first = self._started  # time of the first tokens

    async def whole(self) -> dict[str, Any]:
        """Generate the answer. The object of the whole response."""
        scores: list[TokenLogprobs] = []
        async with aclosing(self._answer.stream()) as batches:
            async for batch in batches:
                self._note_time()
                scores += [entry for event in batch for entry in event.logprobs]
        return {**_head(self._call), **self._shape(_joined(self._answer.blocks)), **self._logprobs(scores), **self._ending()}

    async def stream(self, http: RequestContext) -> None:
        """Send a line for new parts of the answer, and a last one with the counts. An error after the first line is a line, too."""
        error = await send_answer(http, self._answer, lambda: b"", self._lines, LINES)
        last = {**_head(self._call), **self._shape({}), **self._ending()} if error is None else {"error": describe(error).message}
        await http.send(encode(last) + b"\n")
        await http.close_stream()

    def _lines(self, events: list[BlockEvent]) -> bytes:
        """The lines of events that arrived together."""
        self._note_time()
        return b"".join([self._line(event) for event in events])

    def _line(self, event: BlockEvent) -> bytes:
        """The line of an event; empty for one that adds nothing. A call is one line when it is complete."""
        block = event.block
        if block.kind == "call":
            parts: Parts = {"tool_calls": _calls([block])} if event.action == "end" and _calls([block]) else {}
        else:
            parts = {"thinking" if block.kind == "reasoning" else "content": event.text} if event.action == "grow" else {}
        if not parts:
            return b""
        return encode({**_head(self._call), **self._shape(parts), **self._logprobs(event.logprobs), "done": False}) + b"\n"

    def _note_time(self) -> None:
        """Note the time of the first token, at the first call."""
        if self._first == self._started:
            self._first = time.monotonic_ns()

    def _ending(self) -> dict[str, Any]:
        """The members of the last object."""
        answer, now = self._answer, time.monotonic_ns()
        ending = {
            "done": True,
            "done_reason": "stop" if answer.finish_reason is FinishReason.STOP else "length",
            "total_duration": now - self._started,
            "load_duration": 0,
            "prompt_eval_count": answer.usage.prompt_tokens,
            "prompt_eval_duration": self._first - self._started,
            "eval_count": answer.usage.completion_tokens,
            "eval_duration": now - self._first,
        }
        return {**ending, **({"context": [*self._turn.request.prompt, *answer.token_ids]} if self._call.context else {})}

    def _logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        """The member `logprobs`. Empty if it is not requested."""
        if self._call.num_top is None:
            return {}
        return {"logprobs": [{**scored_token(self._turn.service, e.token_id, e.logprob), "top_logprobs": self._top(e)} for e in entries]}

    def _top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        """The most likely tokens at the place of this one."""
        return [scored_token(self._turn.service, token_id, logprob) for token_id, logprob in entry.top[: self._call.num_top]]


def _head(call: OllamaCall) -> dict[str, Any]:
    """The first members of each object."""
    return {"model": call.model, "created_at": now_text()}


def now_text() -> str:
    """The time as in Ollama's responses."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _joined(blocks: list[Block]) -> Parts:
    """The parts of a whole answer."""
    parts: Parts = {"content": "".join(block.text for block in blocks if block.kind == "text")}
    if thinking := "".join(block.text for block in blocks if block.kind == "reasoning"):
        parts["thinking"] = thinking
    if calls := _calls([block for block in blocks if block.kind == "call"]):
        parts["tool_calls"] = calls
    return parts


def _calls(blocks: list[Block]) -> list[dict[str, Any]]:
    """The calls whose arguments are complete."""
    calls = []
    for block in blocks:
        try:
            arguments = json.loads(block.text)
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            calls.append({"function": {"name": block.name, "arguments": arguments}})
    return calls
