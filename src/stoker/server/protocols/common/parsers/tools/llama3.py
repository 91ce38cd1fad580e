"""The format of Llama 3: the answer is {"name": …, "parameters": {…}}, or several of them separated by semicolons.

<|python_tag|> may precede them.
"""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.json_calls import JsonCalls
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser

TAG = "<|python_tag|>"


class Llama3Parser(ToolParser):
    """An answer that starts with an object is a call if the object names a tool of the request."""

    template_marks = ("dictionary of argument name and its value",)
    needs_special_tokens = True

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader: JsonCalls | None = None
        self._plain = False

    def accepts(self, name: str) -> bool:
        """Whether the request has a tool with this name."""
        return name in self._schemas

    def _advance(self) -> bool:
        """Decide at the start whether the answer consists of calls, then read these, or take the text as it is."""
        if self._plain:
            self._text, self._held = self._text + self._held, ""
            return False
        if self._reader is None and not self._detect_start():
            return self._plain
        assert self._reader is not None
        self._consume(self._reader.push(self._held))
        if self._reader.ended:
            self._end_section()
            self._plain = True
        return self._plain

    def _detect_start(self) -> bool:
        """Start the section of calls if the answer starts like one. Otherwise it is plain text, or more text is needed."""
        start = self._held.lstrip()
        if not start or (len(start) < len(TAG) and TAG.startswith(start)):
            return False
        tag = TAG if start.startswith(TAG) else ""
        if not tag and not start.startswith("{"):
            self._plain = True
            return False
        self._start_section()
        self._consume(len(self._held) - len(start) + len(tag))
        self._reader = JsonCalls(self, separators=";")
        return True
