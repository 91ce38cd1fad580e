"""The base of formats with call objects between two markers, with text around them."""

from __future__ import annotations

from typing import ClassVar

from stoker.server.protocols.common.parsers.tools.json_calls import JsonCalls
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser


class TaggedJsonParser(ToolParser):
    """Reads OPEN {call} {call} … CLOSE, or OPEN [{call}, …] CLOSE with `is_list`. CLOSE may be missing.

    White space before OPEN is removed.
    """

    open: ClassVar[str]
    close: ClassVar[str] = ""
    is_list: ClassVar[bool] = False

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader: JsonCalls | None = None

    def _advance(self) -> bool:
        if not self._inside:
            if not self._find_section(self.open):
                return False
            opening, closing, separators = ("[", "]", ",") if self.is_list else ("", "", "")
            self._reader = JsonCalls(self, opening=opening, closing=closing, separators=separators)
        assert self._reader is not None
        if not self._reader.ended:
            self._consume(self._reader.push(self._held))
        return self._reader.ended and self._close()

    def _close(self) -> bool:
        """End the section at CLOSE, or where text follows instead. Returns False if more text is needed to tell the two apart."""
        if self._section is None:  # a section without a call is text, including its white space
            self._skip_space()
            if len(self._held) < len(self.close) and self.close.startswith(self._held):
                return False
            if self._held.startswith(self.close):
                self._consume(len(self.close))
        self._end_section()
        return True
