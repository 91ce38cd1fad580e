"""The format of Llama 3: the answer is {"name": …, "parameters": {…}}, or several of them separated by semicolons.

<|python_tag|> may precede them.
"""

from __future__ import annotations

from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser, read_first_json

TAG = "<|python_tag|>"


class Llama3Parser(ToolParser):
    """Holds back an answer that starts like a call until its end."""

    needs_special_tokens = True

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._held = ""
        self._plain = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        if self._plain:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith("{") or TAG.startswith(start[: len(TAG)]):
            return "", []
        self._plain = True
        held, self._held = self._held, ""
        return held, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        calls = self._calls(held.strip().removeprefix(TAG).strip())
        return ("", calls) if calls else (held, [])

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls if the whole `text` consists of calls of existing tools; otherwise an empty list."""
        calls = []
        while text:
            value, end = read_first_json(text)
            key = "parameters" if isinstance(value, dict) and "parameters" in value else "arguments"
            call = self.call(value, key)
            if call is None or call.name not in self.names:
                return []
            calls.append(call)
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return calls
