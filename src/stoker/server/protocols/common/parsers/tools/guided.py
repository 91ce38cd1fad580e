"""Parsers of calls that a grammar enforces: one function's arguments, or a list of names and parameters."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.json_calls import JsonCalls
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolCall, ToolParser


class ForcedParser(ToolParser):
    """Parses an answer that a grammar constrains to the arguments of one function."""

    def __init__(self, schemas: Schemas, name: str) -> None:
        super().__init__(schemas)
        self._name = name

    def _advance(self) -> bool:
        """Open the call at the first character that is not white space, and add the text to its arguments."""
        if not self._num_calls and self._held.strip():
            self.open_call(self._name)
            self._held = self._held.lstrip()
        if self._num_calls:
            end = len(self._held.rstrip())  # white space at the end is not part of the arguments
            self.add_arguments(self._held[:end])
            self._held = self._held[end:]
        return False

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The remaining output. An empty answer is a call with empty arguments."""
        self._held = ""
        if not self._num_calls:
            self.open_call(self._name)
        return self._take_output()


class RequiredParser(ToolParser):
    """Parses an answer that a grammar constrains to a list of names and parameters. Other text is content."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._start_section()
        self._reader = JsonCalls(self, opening="[", closing="]", separators=",")

    def _advance(self) -> bool:
        """Give the held text to the reader of calls."""
        self._consume(self._reader.push(self._held))
        return False
