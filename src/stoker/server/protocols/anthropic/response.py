"""The message of a whole response, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from stoker.base.types import FinishReason
from stoker.server.protocols.anthropic.request import MessageCall
from stoker.server.protocols.common.chat.answer import Answer
from stoker.server.protocols.common.chat.blocks import Block, BlockEvent

Event = dict[str, Any]


def message_object(call: MessageCall, answer: Answer) -> dict[str, Any]:
    """The message of a finished answer."""
    content = [_finished_block(call, block) for block in answer.blocks if _is_shown(call, block)]
    return {**_head(call), "content": content, **_stop(answer), "usage": usage_object(answer)}


def usage_object(answer: Answer) -> dict[str, Any]:
    """The usage so far. As in Anthropic's API, input_tokens does not count the cached ones."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": answer.num_reasoning_tokens},
    }


class MessageEvents:
    """Converts the events of an answer's blocks to those of the API."""

    def __init__(self, call: MessageCall, answer: Answer) -> None:
        self._call = call
        self._answer = answer
        self._index = -1  # of the content block

    def start(self) -> list[Event]:
        """The events before the first block: message_start, with the number of prompt tokens, and ping."""
        message = {**_head(self._call), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_object(self._answer)}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def push(self, events: list[BlockEvent]) -> list[Event]:
        """The API's events for events of blocks that the client sees."""
        return [converted for event in events if _is_shown(self._call, event.block) for converted in self._convert(event)]

    def finish(self) -> list[Event]:
        """The events after the last block: message_delta, with stop reason and usage, and message_stop."""
        return [{"type": "message_delta", "delta": _stop(self._answer), "usage": usage_object(self._answer)}, {"type": "message_stop"}]

    def _convert(self, event: BlockEvent) -> list[Event]:
        """The API's events for one event of a block: content_block_start, …_delta or …_stop."""
        block = event.block
        match event.action:
            case "start":
                self._index += 1
                return [{"type": "content_block_start", "index": self._index, "content_block": _empty_block(block)}]
            case "grow":
                return [self._delta(_grown(block, event.text))] if block.kind != "reasoning" or self._call.thinking_text else []
        signature = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] if block.kind == "reasoning" else []
        return [*signature, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Event) -> Event:
        """A content_block_delta event for the current block."""
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


SIGNATURE = "none"  # thinking is not signed; clients send the block back only if the signature is not empty


def _is_shown(call: MessageCall, block: Block) -> bool:
    """Whether the client sees the block: reasoning only if the request enables thinking."""
    return call.thinking or block.kind != "reasoning"


def _head(call: MessageCall) -> dict[str, Any]:
    """The members that a message has at its start and at its end."""
    return {"id": call.id, "type": "message", "role": "assistant", "model": call.turn.service.model_name}


def _stop(answer: Answer) -> dict[str, Any]:
    """The members stop_reason and stop_sequence."""
    if answer.finish_reason is not FinishReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    return {"stop_reason": "tool_use" if any(block.kind == "call" for block in answer.blocks) else "end_turn", "stop_sequence": None}


def _empty_block(block: Block) -> dict[str, Any]:
    """The content block of the API as it is at its start."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _finished_block(call: MessageCall, block: Block) -> dict[str, Any]:
    """The content block of the API with its whole content."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text if call.thinking_text else "", "signature": SIGNATURE}
    return {**_empty_block(block), "input": _input(block.text)}


def _grown(block: Block, text: str) -> dict[str, Any]:
    """The delta for `text`, by which a block has grown."""
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object, which is empty if they are cut off or not an object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
