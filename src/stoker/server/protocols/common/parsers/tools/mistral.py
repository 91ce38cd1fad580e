"""The format of Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} per call, after any text."""

from __future__ import annotations

import re

from stoker.server.protocols.common.parsers.calls.json_calls import JsonCalls, JsonScanner
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser, short_id

MARKER = "[TOOL_CALLS]"
# [ARGS] is optional, because the first releases with this format omit it.
_HEADER = re.compile(r"([^\s{}\[\]]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser(ToolParser):
    """Each [TOOL_CALLS] starts a list of calls, or one call."""

    template_marks = ("[TOOL_CALLS]",)
    needs_special_tokens = True

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader: JsonCalls | None = None
        self._arguments: JsonScanner | None = None

    def new_id(self) -> str:
        """An id of nine letters and digits, as Mistral's templates require."""
        return short_id()

    def _advance(self) -> bool:
        """Read the next element of the format from the held text. False if more text is needed."""
        if not self._inside:
            self._reader = self._arguments = None
            return self._find_section(MARKER)
        if self._reader is None and self._arguments is None:
            self._skip_space()
            if not self._held or (self._held[0] != "[" and not self._read_header()):
                return False
            if self._arguments is None:
                self._reader = JsonCalls(self, opening="[", closing="]", separators=",")
        ended = self._push_list(self._reader) if self._reader is not None else self._push_arguments()
        if ended:
            self._end_section()
        return ended

    def _read_header(self) -> bool:
        """Open the call of name[ARGS] if its arguments have started."""
        if (match := _HEADER.match(self._held)) is None:
            return False
        self.open_call(match[1])
        self._consume(match.end())
        self._arguments = JsonScanner()
        return True

    def _push_list(self, reader: JsonCalls) -> bool:
        """Give the held text to the reader of the list. Returns whether the list has ended."""
        self._consume(reader.push(self._held))
        return reader.ended

    def _push_arguments(self) -> bool:
        """Emit the new part of the arguments. Returns whether they have ended."""
        assert self._arguments is not None
        text, used = self._arguments.push(self._held)
        self.add_arguments(text)
        self._consume(used)
        return self._arguments.done or self._arguments.broken
