"""Messages for chat templates, which have the form of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stoker.base.errors import RequestError
from stoker.server.errors import BodyError
from stoker.server.http.json_body import INLINE_BYTES, decode_standard
from stoker.server.threads import compute

MAX_ARGUMENT_CHARS = 8 << 20  # of all tool calls in the messages of a request


class CallArguments(dict[str, Any]):
    """The arguments of an earlier tool call as an object, which most templates expect. Their text is the JSON text.

    DeepSeek's templates concatenate the arguments with text, and InternLM's print them, as they are text in OpenAI's API.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


async def for_template(messages: Any) -> Any:
    """The messages with the arguments of earlier tool calls as objects instead of JSON text, and with the reasoning under the names of
    the templates. The service checks everything else. Raises RequestError for arguments with more than MAX_ARGUMENT_CHARS characters."""
    if not isinstance(messages, list):
        return messages
    size = sum(len(function["arguments"]) for message in messages for function in _functions_with_text(message))
    if size > MAX_ARGUMENT_CHARS:
        limit = f"the arguments of its tool calls have {size} characters, and the limit is {MAX_ARGUMENT_CHARS}"
        raise RequestError("messages", messages, limit, cure="Shorten them.")
    return await compute(with_parsed_arguments, messages, long=size > INLINE_BYTES)


def _functions_with_text(message: Any) -> Iterator[dict[str, Any]]:
    """The functions of a message's tool calls whose arguments are text."""
    calls = message.get("tool_calls") if isinstance(message, dict) and message.get("role") == "assistant" else None
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            yield function


def with_parsed_arguments(messages: list[Any]) -> list[Any]:
    """The result of `for_template`, without its limit."""
    return [_for_template(message) if isinstance(message, dict) and message.get("role") == "assistant" else message for message in messages]


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Most templates read `reasoning_content`, which some clients send as `reasoning`. That of gpt-oss reads `thinking`, and fails if a
    message has content, too."""
    message = dict(message)
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_parse_arguments(call) for call in calls]
    if isinstance(reasoning := message.get("reasoning_content", message.get("reasoning")), str):
        message["reasoning_content"] = reasoning
        if not message.get("content"):
            message.setdefault("thinking", reasoning)
    return message


def _parse_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object; unchanged if they are not the JSON of an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = _decode(function["arguments"])
    except (ValueError, RecursionError, BodyError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": CallArguments(arguments, function["arguments"])}}


def _decode(text: str) -> Any:
    """The value of JSON text. A long text has the limits of a large body. Raises ValueError, RecursionError and BodyError."""
    return json.loads(text) if len(text) <= INLINE_BYTES else decode_standard(text.encode(), long_lists=False)
