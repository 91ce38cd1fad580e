"""The base of formats with a header and a JSON object per call, inside a section: OPEN (CALL_OPEN header {…} CALL_CLOSE)* CLOSE."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from stoker.server.protocols.common.parsers.calls.json_calls import MAX_HEADER_CHARS, JsonScanner
from stoker.server.protocols.common.parsers.markers import first_marker, is_partial, partial_marker_start
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser


class HeadedCallsParser(ToolParser):
    """Text between the arguments and CALL_CLOSE is not part of the call. CALL_CLOSE and CLOSE may be missing."""

    needs_special_tokens = True
    open: ClassVar[str]
    close: ClassVar[str]
    call_open: ClassVar[str]
    call_close: ClassVar[str]
    header: ClassVar[re.Pattern[str]]  # what lies between CALL_OPEN and the arguments, with the group `name` and optionally `id`

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._state: Literal["between", "header", "arguments", "after"] = "between"
        self._arguments = JsonScanner()

    def _advance(self) -> bool:
        """Read the next element of the format from the held text. False if more text is needed."""
        if not self._inside:
            self._state = "between"
            return self._find_section(self.open)
        match self._state:
            case "between":
                return self._next_call()
            case "header":
                return self._read_header()
            case "arguments":
                return self._push_arguments()
            case "after":
                return self._skip_to_close()

    def _next_call(self) -> bool:
        """Read CALL_OPEN or CLOSE. The section ends at other text, which becomes content. False if more text is needed."""
        self._skip_space()
        if is_partial(self._held, self.call_open, self.close):
            return False
        if self._held.startswith(self.call_open):
            self._consume(len(self.call_open))
            self._state = "header"
            return True
        if self._held.startswith(self.close):
            self._consume(len(self.close))
        self._end_section()
        return True

    def _read_header(self) -> bool:
        """Open the call once its header is complete. The section ends at text without a header. False if more text is needed."""
        if (match := self.header.match(self._held, 0, MAX_HEADER_CHARS)) is not None:
            self.open_call(match["name"], match.groupdict().get("id"))
            self._consume(match.end())
            self._state, self._arguments = "arguments", JsonScanner()
            return True
        if self.call_close not in self._held and len(self._held) < MAX_HEADER_CHARS:
            return False
        self._end_section()
        return True

    def _push_arguments(self) -> bool:
        """Emit the new part of the arguments. Returns whether they have ended."""
        text, used = self._arguments.push(self._held)
        self.add_arguments(text)
        self._consume(used)
        if self._arguments.done or self._arguments.broken:
            self._state = "after"
        return self._state == "after"

    def _skip_to_close(self) -> bool:
        """Remove the text up to CALL_CLOSE, or up to the marker that stands in its place."""
        markers = (self.call_close, self.call_open, self.close)
        if (found := first_marker(self._held, markers)) is None:
            self._consume(partial_marker_start(self._held, *markers))
            return False
        index, marker = found
        self._consume(index + (len(marker) if marker == self.call_close else 0))
        self._state = "between"
        return True
