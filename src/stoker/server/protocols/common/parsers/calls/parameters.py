"""The base of formats with one marked value per argument, such as <parameter=KEY>VALUE</parameter>. The arguments are emitted as JSON."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from stoker.server.protocols.common.parsers.calls.argument_types import json_of_text, json_string, parameter_types
from stoker.server.protocols.common.parsers.calls.json_calls import MAX_HEADER_CHARS
from stoker.server.protocols.common.parsers.markers import is_partial, partial_marker_start
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser


class ParametersParser(ToolParser):
    """Reads OPEN (call_header (parameter_header VALUE value_close)* call_close)* CLOSE.

    Strings are emitted while they arrive, other values when they are complete. With `newlines`, one newline at the start and one at the
    end of a value are part of the markers. Text that belongs to no parameter ends the call and the section.
    """

    open: ClassVar[str]
    close: ClassVar[str]
    call_open: ClassVar[str]  # the start of a call header
    call_header: ClassVar[re.Pattern[str]]  # with the group `name`
    call_close: ClassVar[str]  # may be equal to CLOSE
    parameter_open: ClassVar[str]  # the start of a parameter header
    parameter_header: ClassVar[re.Pattern[str]]  # with the group `key`
    value_close: ClassVar[str]
    newlines: ClassVar[bool] = False

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._state: Literal["between", "call", "string", "value"] = "between"
        self._name = ""
        self._types: set[str] = set()
        self._num_arguments = 0
        self._value_started = False
        self._searched = 0  # characters of the held text that do not contain the start of value_close

    def _advance(self) -> bool:
        """Read the next element of the format from the held text. False if more text is needed."""
        if not self._inside:
            self._state = "between"
            return self._find_section(self.open)
        match self._state:
            case "between":
                return self._next_call()
            case "call":
                return self._next_parameter()
            case _:
                return self._push_value()

    def _next_call(self) -> bool:
        """Read a call header or CLOSE; other text ends the section."""
        self._skip_space()
        if is_partial(self._held, self.close):
            return False
        if (match := self.call_header.match(self._held, 0, MAX_HEADER_CHARS)) is not None:
            self._name = match["name"]
            self.open_call(self._name)
            self._consume(match.end())
            self._state, self._num_arguments = "call", 0
            return True
        if self._may_become_header(self.call_open):
            return False
        self._end_at(self.close)
        return True

    def _next_parameter(self) -> bool:
        """Read a parameter header or the end of the call, which other text ends too."""
        self._skip_space()
        if is_partial(self._held, self.call_close):
            return False
        if (match := self.parameter_header.match(self._held, 0, MAX_HEADER_CHARS)) is not None:
            self._open_value(match["key"].strip())
            self._consume(match.end())
            return True
        if self._may_become_header(self.parameter_open):
            return False
        self.add_arguments("}" if self._num_arguments else "{}")
        if self.call_close == self.close or not self._held.startswith(self.call_close):
            self._end_at(self.close)
        else:
            self._consume(len(self.call_close))
            self._state = "between"
        return True

    def _may_become_header(self, start: str) -> bool:
        """Whether the held text may be the start of a header that begins with `start`. No header contains the end of a call."""
        possible = self._held.startswith(start) or is_partial(self._held, start)
        return possible and self.call_close not in self._held and len(self._held) < MAX_HEADER_CHARS

    def _end_at(self, marker: str) -> None:
        """End the section, with the marker if the held text starts with it."""
        if self._held.startswith(marker):
            self._consume(len(marker))
        self._end_section()

    def _open_value(self, key: str) -> None:
        """Emit the key of an argument, and prepare for its value."""
        self._types = parameter_types(self._schemas.get(self._name, {}), key)
        self._state = "string" if self._types == {"string"} else "value"
        self._value_started, self._searched = False, 0
        self.add_arguments(("{" if not self._num_arguments else ", ") + json_string(key) + ": " + ('"' if self._state == "string" else ""))
        self._num_arguments += 1

    def _push_value(self) -> bool:
        """Emit the new part of a string, or a whole value of another type. Returns whether the value has ended."""
        if self.newlines and not self._value_started:
            if not self._held:
                return False
            self._consume(self._held.startswith("\n"))
        self._value_started = True
        end = self._held.find(self.value_close, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(self.value_close)) if self._state == "value" else 0
            closes = (self.value_close, "\n" + self.value_close) if self.newlines else (self.value_close,)
            if self._state == "string":
                self._emit_string(partial_marker_start(self._held, *closes))
            return False
        text_end = end - (self.newlines and self._held.endswith("\n", 0, end))
        if self._state == "string":
            self._emit_string(text_end)
            self.add_arguments('"')
        else:
            self.add_arguments(json_of_text(self._held[:text_end], self._types))
            self._consume(text_end)
        self._consume(self._held.index(self.value_close) + len(self.value_close))
        self._state = "call"
        return True

    def _emit_string(self, size: int) -> None:
        """Emit the first `size` characters of the held text as a part of a JSON string."""
        self.add_arguments(json_string(self._held[:size])[1:-1])
        self._consume(size)
