"""The objects of the Responses API: the response, and the items of its output."""

from __future__ import annotations

import time
import uuid
from typing import Any

from stoker.base.types import FinishReason, TokenLogprobs
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.blocks import Block, Kind
from stoker.server.protocols.common.logprobs import scored_token
from stoker.server.protocols.openai.responses.request import ResponseCall

_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def response_object(call: ResponseCall, status: str, created: int) -> dict[str, Any]:
    """The API's response object without output, as in the first events of a stream. `created`: Unix time in seconds."""
    values, params = call.values, call.turn.request.params
    return {
        "id": call.id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": values.get("background", False),
        "error": None,
        "incomplete_details": None,
        "model": call.turn.service.model_name,
        "output": [],
        "usage": None,
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None, **values.get("reasoning", {})},
        "service_tier": "default",
        "store": call.store,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **values.get("text", {})},
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": list(values.get("tools", ())),
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": params.top_p,
        "truncation": values.get("truncation", "disabled"),
        "metadata": values.get("metadata", {}),
        **{name: values.get(name) for name in _ECHOED},
    }


def finished_object(started: dict[str, Any], answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The response with its output: completed, incomplete if it was cut off, or cancelled."""
    finished = {**started, "output": items, "usage": usage_object(answer)}
    match answer.finish_reason:
        case FinishReason.STOP:
            return {**finished, "status": "completed", "completed_at": int(time.time())}
        case FinishReason.CANCELLED:
            return {**finished, "status": "cancelled"}
    return {**finished, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


def failed_object(started: dict[str, Any], failure: Failure) -> dict[str, Any]:
    """The response after an error."""
    code = "rate_limit_exceeded" if failure.status == 429 else "invalid_prompt" if failure.status < 500 else "server_error"
    return {**started, "status": "failed", "error": {"code": code, "message": failure.message}}


def usage_object(answer: Answer) -> dict[str, Any]:
    """The member `usage` of a response."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class OutputItem:
    """One item of the output, which grows with its block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.id = f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"
        self.logprobs: list[dict[str, Any]] = []

    def object(self, status: str) -> dict[str, Any]:
        """The item. While it is in progress, it is empty."""
        started = status != "in_progress"
        match self.block.kind:
            case "call":
                arguments = self.block.text if started else ""
                called = {"call_id": self.block.call_id, "name": self.block.name, "arguments": arguments}
                return {"id": self.id, "type": "function_call", "status": status, **called}
            case "reasoning":
                content = [self.part(self.block.text)] if started else []
                return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        content = [self.part(self.block.text)] if started else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def finished(self) -> dict[str, Any]:
        """The item as it is at the end. Incomplete if its block was cut off."""
        return self.object("completed" if self.block.ended else "incomplete")

    def part(self, text: str) -> dict[str, Any]:
        """The content part of a message or of reasoning, with this text."""
        if self.block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}


def logprobs_object(service: Service, entries: list[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The log-probabilities of an output_text part, with `num_top` candidates per token."""
    return [
        {
            **scored_token(service, entry.token_id, entry.logprob),
            "top_logprobs": [scored_token(service, token_id, logprob) for token_id, logprob in entry.top[:num_top]],
        }
        for entry in entries
    ]
