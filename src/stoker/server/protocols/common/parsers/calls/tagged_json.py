"""The base of formats with call objects between two markers, with text around them."""

from __future__ import annotations

from typing import ClassVar

from stoker.server.protocols.common.parsers.calls.json_calls import JsonCalls
from stoker.server.protocols.common.parsers.markers import is_partial
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser


class TaggedJsonParser(ToolParser):
    """Reads OPEN {call} {call} … CLOSE, where OPEN is one of `opens` and CLOSE one of `closes`, or missing.

    `separators` are characters that may precede, separate and follow the objects. White space before OPEN is removed.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()
    separators: ClassVar[str] = ""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader: JsonCalls | None = None

    def _advance(self) -> bool:
        """Read the next element of the format from the held text. False if more text is needed."""
        if not self._inside:
            if not self._find_section(*self.opens):
                return False
            self._reader = JsonCalls(self, separators=self.separators)
        assert self._reader is not None
        if not self._reader.ended:
            self._consume(self._reader.push(self._held))
        return self._reader.ended and self._close()

    def _close(self) -> bool:
        """End the section at CLOSE, or at other text. False if more text is needed to distinguish the two."""
        if self._section is None:  # a section without a call is text, including its white space
            self._skip_space()
            if is_partial(self._held, *self.closes):
                return False
            if (close := next((close for close in self.closes if self._held.startswith(close)), None)) is not None:
                self._consume(len(close))
        self._end_section()
        return True
