"""Checks chat messages before they reach a chat template: a list of messages with a role and text."""

from __future__ import annotations

from typing import Any

from stoker.base.errors import RequestError

MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64
TEXT_PARTS = ("text", "input_text", "output_text")


class NoContent(str):
    """The content of a message without text. It is empty text that also equals None.

    Some templates concatenate content without a test for None, and others recognize tool calls by a content of None. Both render.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def check_messages(messages: Any, *, max_chars: int) -> list[dict[str, Any]]:
    """Checked copies of the messages, each with one string as content; text parts are joined by newlines. Raises RequestError.

    An assistant message with tool_calls may have no content; its content is then NoContent. Other keys (name, tool_calls, …) are retained
    for the template. `max_chars` limits the text of all messages together.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages", messages, "it must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("messages", messages, f"there are {len(messages)} messages, and the limit is {MAX_MESSAGES}")
    checked = [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    size = sum(len(message["content"]) for message in checked)
    if size > max_chars:
        raise RequestError(
            "messages", messages, f"they have {size} characters, and the limit of the model is {max_chars}", cure="Shorten them."
        )
    return checked


def _check_message(message: Any, field: str) -> dict[str, Any]:
    """A checked copy of one message. `field` is its name in errors."""
    if not isinstance(message, dict):
        raise RequestError(field, message, "a message must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARS:
        raise RequestError(f"{field}.role", role, f"it must be a string of 1 to {MAX_ROLE_CHARS} characters")
    return {**message, "content": _text(message, f"{field}.content")}


def _text(message: dict[str, Any], field: str) -> str:
    """The content of one message as a string."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return NoContent()
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{field}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(field, content, "it must be a string or a list of text parts")
    return content


def _part_text(part: Any, field: str) -> str:
    """The text of one content part. Raises RequestError for parts that are not text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise RequestError(f"{field}.type", kind, "this model reads text only", cure='Use parts of the form {"type": "text", "text": …}.')
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{field}.text", text, "it must be a string")
    return text
