"""{"messages"} of the rolling batch: OpenAI's schema in, the DJL server's spelling of its answers out."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from stoker.base.errors import RequestError
from stoker.base.types import Delta, FinishReason, TokenLogprobs
from stoker.frontend.service import Choice, Service
from stoker.server.errors import sequence_error
from stoker.server.protocols.openai import wire
from stoker.server.protocols.openai.chat_request import Call, read_call
from stoker.server.protocols.sagemaker.reply import JSON_LINES, Reply
from stoker.server.protocols.sagemaker.shapes import encode
from stoker.server.protocols.sagemaker.tokens import finish_name
from stoker.server.schemas.settings import ServerSettings


async def chat(reply: Reply, service: Service, body: dict[str, Any], settings: ServerSettings) -> None:
    """Answer one conversation. `model` is not looked at, as there: the path chose it. Raises RequestError."""
    call = await read_call({name: value for name, value in body.items() if name != "model"}, service, settings)
    if call.parsed:
        raise RequestError("tools", "…", "tool calls and reasoning are parted on /v1/chat/completions only", cure="Ask there.")
    if call.asked.stream:
        await _stream(reply, call)
    else:
        await reply.whole(await _whole(call))


async def _whole(call: Call) -> bytes:
    completion = await call.service.complete(call.request)
    usage = wire.usage_object(completion.usage)
    del usage["prompt_tokens_details"]
    head = {name: call.head[name] for name in ("id", "object", "created")}
    return encode({**head, "choices": [_choice(call, choice) for choice in completion.choices], "usage": usage}).encode()


def _choice(call: Call, choice: Choice) -> dict[str, Any]:
    if choice.finish_reason is FinishReason.ERROR:
        raise sequence_error(choice.error, ready=call.service.ready)
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text},
        "logprobs": _logprobs(call, choice.logprobs),
        "finish_reason": finish_name(choice.finish_reason, choice.stop_reason),
    }


def _logprobs(call: Call, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
    if call.num_top is None:
        return None
    return {"content": wire.chat_logprobs(call.service, entries, call.num_top)["content"]}


async def _stream(reply: Reply, call: Call) -> None:
    head = {"id": call.head["id"], "object": "chat.completion.chunk", "created": call.head["created"]}
    begun: set[int] = set()
    async with aclosing(call.service.stream(call.request)) as batches:
        async for deltas in batches:
            failed = next((delta for delta in deltas if delta.finish_reason is FinishReason.ERROR), None)
            if failed is not None:
                error = sequence_error(failed.error, ready=call.service.ready)
                if not reply.exchange.started:
                    raise error
                await reply.fail(error, JSON_LINES)
                return
            if not reply.exchange.started:
                await reply.open(JSON_LINES)
            await reply.send("".join([encode({**head, "choices": [_chunk(call, d, begun)]}) + "\n" for d in deltas]).encode())
    await reply.close()


def _chunk(call: Call, delta: Delta, begun: set[int]) -> dict[str, Any]:
    shown = {"content": delta.text} | ({} if delta.index in begun else {"role": "assistant"})
    begun.add(delta.index)
    end = None if delta.finish_reason is None else finish_name(delta.finish_reason, delta.stop_reason)
    return {"index": delta.index, "delta": shown, "logprobs": _logprobs(call, delta.logprobs), "finish_reason": end}
