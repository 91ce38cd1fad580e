"""The format of Hermes and Qwen: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>, with text around them."""

from __future__ import annotations

from stoker.server.protocols.openai.parsers.markers import partial_marker_start
from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Removes white space before a call."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._held = ""
        self._inside = False
        self._searched = 0  # number of characters of a call that were searched for CLOSE already

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        plain = ""
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                plain += self._take_text()
                if not self._inside:
                    return plain, calls
            if (call := self._take_call()) is None:
                return plain, calls
            calls.append(call)

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        call = self.call(read_json(held))  # CLOSE may be missing
        return ("", [call]) if call is not None else (OPEN + held, [])

    def _take_text(self) -> str:
        """Text up to a call, or up to what may be the start of one."""
        if (start := self._held.find(OPEN)) >= 0:
            text, self._held = self._held[:start].rstrip(), self._held[start + len(OPEN) :]
            self._inside, self._searched = True, 0
            return text
        end = partial_marker_start(self._held, OPEN)
        end = len(self._held[:end].rstrip())
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _take_call(self) -> ToolCall | None:
        """The call if its CLOSE has arrived. A CLOSE inside a JSON string does not count."""
        while (end := self._held.find(CLOSE, self._searched)) >= 0:
            if (call := self.call(read_json(self._held[:end]))) is not None:
                self._held, self._inside = self._held[end + len(CLOSE) :], False
                return call
            self._searched = end + len(CLOSE)
        self._searched = max(self._searched, len(self._held) - len(CLOSE) + 1)
        return None
