"""Builds messages for a chat template from the items of APIs in which a turn consists of separate parts."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Messages in the form of OpenAI's chat API. Consecutive parts of the assistant's turn become one message.

    Instructions before the first other message are joined to one system message, because many templates read only the first one.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # the texts of each are lists of parts
        self._names: dict[str, str] = {}  # id of each call → name of its function

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages."""
        return [_joined(message) for message in self._messages]

    def add_system(self, text: str) -> None:
        """Instructions of the developer."""
        if self._messages and all(message["role"] == "system" for message in self._messages):
            self._messages[-1]["content"] += ["\n\n", text]
        else:
            self._messages.append({"role": "system", "content": [text]})

    def add_user(self, text: str) -> None:
        """Text of the user's turn."""
        self._messages.append({"role": "user", "content": [text]})

    def add_result(self, call_id: str, text: str) -> None:
        """The result of a tool call."""
        message = {"role": "tool", "tool_call_id": call_id, "content": [text]}
        self._messages.append({**message, **({"name": self._names[call_id]} if call_id in self._names else {})})

    def start_assistant(self) -> None:
        """Start a new message of the assistant. Later parts belong to it, instead of the message before."""
        self._messages.append({"role": "assistant"})

    def add_answer(self, text: str) -> None:
        """Text of the assistant's turn."""
        content = self._assistant().setdefault("content", [])
        content += ["\n", text] if any(content) else [text]

    def add_reasoning(self, text: str) -> None:
        """Reasoning of the assistant's turn, which templates read as reasoning_content."""
        self._assistant().setdefault("reasoning_content", []).append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant's turn. `arguments` is JSON text."""
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> dict[str, Any]:
        """The message of the present assistant's turn."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.start_assistant()
        return self._messages[-1]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its texts in one piece, and with empty content if it has neither content nor calls, which templates require."""
    texts: dict[str, Any] = {name: "".join(message[name]) for name in ("content", "reasoning_content") if name in message}
    return {**message, **texts} if "content" in message or "tool_calls" in message else {**message, **texts, "content": ""}
