"""Messages of Ollama's chat API, checked and converted to messages for the chat template."""

from __future__ import annotations

import json
from typing import Any

from stoker.base.errors import RequestError
from stoker.server.protocols.common.chat.conversation import Conversation

MAX_MESSAGES = 4096
ROLES = ("system", "user", "assistant", "tool")


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages for the chat template. Calls receive ids, which Ollama's API does not have. Raises RequestError."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestError("messages", messages, f"it must be a list of 1 to {MAX_MESSAGES} messages")
    reader = _Reader()
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{i}]", message, "a message must be an object with role and content")
        reader.add(message, f"messages[{i}]")
    return reader.conversation.messages


class _Reader:
    """Adds messages to a conversation. A result belongs to the first open call of its function, or else to the first open call."""

    def __init__(self) -> None:
        self.conversation = Conversation()
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []  # (id, name) of calls without a result
        self._previous = ""

    def add(self, message: dict[str, Any], field: str) -> None:
        """Add one message. Raises RequestError, with the name `field`, for an unknown role, images, and members of a wrong type."""
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{field}.role", role, f"it must be one of {', '.join(ROLES)}")
        if message.get("images"):
            raise RequestError(f"{field}.images", message["images"], "this model reads text only", cure="Leave it out.")
        text = _text(message, "content", field)
        match role:
            case "system":
                self.conversation.add_system(text)
            case "user":
                self.conversation.add_user(text)
            case "assistant":
                self._add_answer(message, text, field)
            case "tool":
                self.conversation.add_result(self._take_call(_text(message, "tool_name", field)), text)
        self._previous = str(role)

    def _add_answer(self, message: dict[str, Any], text: str, field: str) -> None:
        """Add a message of the assistant: its reasoning, text and tool calls."""
        if self._previous == "assistant":
            self.conversation.start_assistant()
        if thinking := _text(message, "thinking", field):
            self.conversation.add_reasoning(thinking)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise RequestError(f"{field}.tool_calls", calls, "it must be a list")
        if text or not calls:
            self.conversation.add_answer(text)
        for i, call in enumerate(calls):
            self._add_call(call, f"{field}.tool_calls[{i}]")

    def _add_call(self, call: Any, field: str) -> None:
        """Add a tool call, which gets an id because Ollama's calls have none. Raises RequestError for a wrong form."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(field, call, 'it must be {"function": {"name": …, "arguments": {…}}}')
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise RequestError(f"{field}.function.arguments", arguments, "it must be an object")
        call_id = f"call{self._num_calls:05d}"  # nine letters and digits, which some templates require
        self._num_calls += 1
        self._open.append((call_id, function["name"]))
        self.conversation.add_call(call_id, function["name"], json.dumps(arguments, ensure_ascii=False))

    def _take_call(self, name: str) -> str:
        """The id of the open call to which a result of the function `name` belongs. A new id if no call is open."""
        place = next((i for i, (_, called) in enumerate(self._open) if called == name), 0)
        return self._open.pop(place)[0] if self._open else f"call{self._num_calls:05d}"


def _text(message: dict[str, Any], name: str, field: str) -> str:
    """A member that is text, or empty if absent. Raises RequestError if it has another type."""
    value = message.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{field}.{name}", value, "it must be a string")
    return value
