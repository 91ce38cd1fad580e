"""The items of a conversation: checked, and converted to messages for the chat template."""

from __future__ import annotations

import uuid
from typing import Any

from stoker.base.errors import RequestError
from stoker.server.protocols.common.chat.conversation import Conversation

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def read_input(value: Any) -> list[dict[str, Any]]:
    """The items of the field input, each with a type and an id. Text stands for one message of the user. Raises RequestError."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise RequestError("input", value, "it must be text or a list of at least one item")
    if len(value) > MAX_ITEMS:
        raise RequestError("input", value, f"it has {len(value)} items, and the limit is {MAX_ITEMS}")
    return [_read_item(item, f"input[{i}]") for i, item in enumerate(value)]


def to_conversation(instructions: str | None, items: list[dict[str, Any]]) -> Conversation:
    """The messages of checked items."""
    conversation = Conversation()
    if instructions:
        conversation.add_system(instructions)
    previous = ""
    for item in items:
        kind = item["type"]
        if kind == "message":
            _add_message(conversation, item, follows_answer=previous == "message")
        elif kind == "function_call":
            conversation.add_call(item["call_id"], item["name"], item["arguments"])
        elif kind == "function_call_output":
            conversation.add_result(item["call_id"], _joined(item["output"]))
        elif text := _joined(item.get("content") or item["summary"]):
            conversation.add_reasoning(text)
        previous = kind
    return conversation


def _add_message(conversation: Conversation, item: dict[str, Any], *, follows_answer: bool) -> None:
    """Add a message item. `follows_answer`: the previous item belongs to the assistant's turn, too."""
    text = _joined(item["content"])
    match item["role"]:
        case "user":
            conversation.add_user(text)
        case "assistant":
            if follows_answer:
                conversation.start_assistant()
            conversation.add_answer(text)
        case _:
            conversation.add_system(text)


def _joined(content: str | list[dict[str, Any]]) -> str:
    """The text of a message's content. Parts are separated by newlines."""
    return content if isinstance(content, str) else "\n".join(part.get("text", part.get("refusal", "")) for part in content)


def _read_item(item: Any, field: str) -> dict[str, Any]:
    """The item, checked and completed. Raises RequestError, with the name `field`, for an item that is not supported."""
    if not isinstance(item, dict):
        raise RequestError(field, item, "an item must be an object")
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            return _message(item, field)
        case "function_call":
            _check_texts(item, field, "call_id", "name", "arguments")
            return _with_id(item, "fc")
        case "function_call_output":
            _check_texts(item, field, "call_id")
            return _with_id({**item, "output": _content(item.get("output"), f"{field}.output")}, "fco")
        case "reasoning":
            return _reasoning(item, field)
        case "item_reference":
            cure = "Use previous_response_id, or send the item itself."
            raise RequestError(f"{field}.type", kind, "items are not stored separately", cure=cure)
    raise RequestError(f"{field}.type", kind, f"it must be one of {', '.join(ITEM_TYPES)}")


def _message(item: dict[str, Any], field: str) -> dict[str, Any]:
    """A message item, checked, with its content as a list of parts. Raises RequestError."""
    if item.get("role") not in ROLES:
        raise RequestError(f"{field}.role", item.get("role"), f"it must be one of {', '.join(ROLES)}")
    content = _content(item.get("content"), f"{field}.content")
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    if kind == "output_text":
        parts = [part if part["type"] == "refusal" else {"annotations": [], **part, "type": kind} for part in parts]
    return _with_id({"status": "completed", **item, "type": "message", "content": parts}, "msg")


def _reasoning(item: dict[str, Any], field: str) -> dict[str, Any]:
    """A reasoning item of an earlier answer. Its content has the text; encrypted_content of other servers cannot be read."""
    checked = {**item, "summary": item.get("summary") or [], "content": item.get("content") or []}
    for name in ("summary", "content"):
        if not isinstance(checked[name], list) or any(not isinstance(part, dict) for part in checked[name]):
            raise RequestError(f"{field}.{name}", checked[name], "it must be a list of text parts")
        _check_parts(checked[name], f"{field}.{name}", (f"{name}_text", "reasoning_text", "summary_text"))
    return _with_id(checked, "rs")


def _content(content: Any, field: str) -> str | list[dict[str, Any]]:
    """The content of a message, checked to be text or a list of objects. Raises RequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(not isinstance(part, dict) for part in content):
        raise RequestError(field, content, "it must be a string or a list of text parts")
    _check_parts(content, field, TEXT_PARTS)
    return content


def _check_parts(parts: list[dict[str, Any]], field: str, types: tuple[str, ...]) -> None:
    """Raise RequestError if a part has another type than `types` or refusal, or no text."""
    for i, part in enumerate(parts):
        name = "refusal" if part.get("type") == "refusal" else "text"
        if part.get("type") not in types and name == "text":
            cure = f'Use parts of the form {{"type": "{types[0]}", "text": …}}.'
            raise RequestError(f"{field}[{i}].type", part.get("type"), "this model reads text only", cure=cure)
        if not isinstance(part.get(name), str):
            raise RequestError(f"{field}[{i}].{name}", part.get(name), "it must be a string")


def _check_texts(item: dict[str, Any], field: str, *names: str) -> None:
    """Raise RequestError if one of these members is not text."""
    for name in names:
        if not isinstance(item.get(name), str):
            raise RequestError(f"{field}.{name}", item.get(name), "it must be a string")


def _with_id(item: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The item with an id, as lists of input items contain."""
    return item if isinstance(item.get("id"), str) else {**item, "id": f"{prefix}_{uuid.uuid4().hex}"}
