"""Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them, text around."""

from __future__ import annotations

from stoker.server.protocols.openai.parsers.marks import held_from
from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """White space before a call is not text."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._held = ""
        self._inside = False
        self._searched = 0  # how much of a call's text was searched for CLOSE already

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        shown = ""
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                shown += self._outside()
                if not self._inside:
                    return shown, calls
            if (call := self._close()) is None:
                return shown, calls
            calls.append(call)

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        call = self.call(read_json(held))  # the end mark may be cut off
        return ("", [call]) if call is not None else (OPEN + held, [])

    def _outside(self) -> str:
        """Text up to a call, or up to what may become one."""
        if (start := self._held.find(OPEN)) >= 0:
            shown, self._held = self._held[:start].rstrip(), self._held[start + len(OPEN) :]
            self._inside, self._searched = True, 0
            return shown
        end = held_from(self._held, OPEN)
        end = len(self._held[:end].rstrip())
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def _close(self) -> ToolCall | None:
        """The call whose end mark has come. An end mark inside a JSON string does not count."""
        while (end := self._held.find(CLOSE, self._searched)) >= 0:
            if (call := self.call(read_json(self._held[:end]))) is not None:
                self._held, self._inside = self._held[end + len(CLOSE) :], False
                return call
            self._searched = end + len(CLOSE)
        self._searched = max(self._searched, len(self._held) - len(CLOSE) + 1)
        return None
