"""Messages with content blocks, checked and converted to messages for the chat template."""

from __future__ import annotations

import json
from typing import Any

from stoker.base.errors import RequestError
from stoker.server.protocols.common.chat.conversation import Conversation

MAX_MESSAGES = 4096
MAX_BLOCKS = 4096  # of one message


def read_conversation(system: Any, messages: Any) -> Conversation:
    """The conversation of the fields system and messages. Raises RequestError."""
    conversation = Conversation()
    if system is not None and (text := _text(system, "system")):
        conversation.add_system(text)
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestError("messages", messages, f"it must be a list of 1 to {MAX_MESSAGES} messages")
    previous = None
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        match role:
            case "user":
                _add_user(conversation, message, field)
            case "assistant":
                if previous == "assistant":
                    conversation.start_assistant()
                _add_assistant(conversation, message, field)
            case "system":
                conversation.add_system(_text(message.get("content"), f"{field}.content"))
            case _:
                raise RequestError(f"{field}.role", role, "it must be user, assistant or system")
        previous = role
    return conversation


def _add_user(conversation: Conversation, message: dict[str, Any], field: str) -> None:
    """Add tool results, each as a message of its own, and text. Consecutive text blocks are one message."""
    texts: list[str] = []
    for block, name in _blocks(message.get("content"), f"{field}.content"):
        if block["type"] == "tool_result":
            _flush(conversation, texts)
            _add_result(conversation, block, name)
        else:
            texts.append(_block_text(block, name))
    _flush(conversation, texts)


def _flush(conversation: Conversation, texts: list[str]) -> None:
    """Add the texts collected so far as one message of the user, and empty the list."""
    if texts:
        conversation.add_user("\n".join(texts))
        texts.clear()


def _add_result(conversation: Conversation, block: dict[str, Any], field: str) -> None:
    """Add the message of a tool_result block. Raises RequestError if its tool_use_id is not a string, or its content is not text."""
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise RequestError(f"{field}.tool_use_id", call_id, "it must be a string")
    text = _text(block.get("content") or "", f"{field}.content")
    conversation.add_result(call_id, f"Error: {text}" if block.get("is_error") is True else text)


def _add_assistant(conversation: Conversation, message: dict[str, Any], field: str) -> None:
    """Add an assistant's message, block by block: text, thinking and tool calls. Raises RequestError for other blocks."""
    blocks = _blocks(message.get("content"), f"{field}.content")
    if not blocks:
        conversation.add_answer("")
    for block, name in blocks:
        match block["type"]:
            case "thinking":
                if not isinstance(block.get("thinking"), str):
                    raise RequestError(f"{name}.thinking", block.get("thinking"), "it must be a string")
                conversation.add_reasoning(block["thinking"])
            case "redacted_thinking":
                continue  # encrypted by another server
            case "tool_use":
                _add_call(conversation, block, name)
            case _:
                conversation.add_answer(_block_text(block, name))


def _add_call(conversation: Conversation, block: dict[str, Any], field: str) -> None:
    """Add the tool call of a tool_use block. Raises RequestError if id or name is not a string, or input is not an object."""
    for name in ("id", "name"):
        if not isinstance(block.get(name), str):
            raise RequestError(f"{field}.{name}", block.get(name), "it must be a string")
    if not isinstance(block.get("input"), dict):
        raise RequestError(f"{field}.input", block.get("input"), "it must be an object")
    conversation.add_call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))


def _text(content: Any, field: str) -> str:
    """The text of a string or of text blocks."""
    return "\n".join(_block_text(block, name) for block, name in _blocks(content, field))


def _blocks(content: Any, field: str) -> list[tuple[dict[str, Any], str]]:
    """The content as blocks with a type, each with the path of its field. A string is one text block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, field)]
    if not isinstance(content, list) or len(content) > MAX_BLOCKS:
        raise RequestError(field, content, f"it must be a string or a list of at most {MAX_BLOCKS} blocks")
    blocks = [(block, f"{field}[{i}]") for i, block in enumerate(content)]
    for block, name in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(name, block, "a block must be an object with a type")
    return blocks


def _block_text(block: dict[str, Any], field: str) -> str:
    """The text of a text block. Raises RequestError, with the name `field`, for a block of another type."""
    if block["type"] != "text":
        cure = 'Use blocks of the form {"type": "text", "text": …}.'
        raise RequestError(f"{field}.type", block["type"], "this model reads text only, and this block is not allowed here", cure=cure)
    if not isinstance(block.get("text"), str):
        raise RequestError(f"{field}.text", block.get("text"), "it must be a string")
    return str(block["text"])
