"""The format of Llama 4 and 3.2: the answer is a list of Python calls, [NAME(key="value", other=1), NAME()].

The list may be between <|python_start|> and <|python_end|>.
"""

from __future__ import annotations

import re
from typing import Literal

from stoker.server.protocols.common.parsers.calls.json_calls import MAX_HEADER_CHARS
from stoker.server.protocols.common.parsers.calls.python_values import PythonArguments
from stoker.server.protocols.common.parsers.markers import is_partial
from stoker.server.protocols.common.parsers.tools.parser import Schemas, ToolParser

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"\s*([\w.\-]+)\s*\(")
_NAME_START = re.compile(r"\s*[\w.\-]*\s*")


class Llama4PythonicParser(ToolParser):
    """A list at the start of the answer contains calls if its first element is a call of a tool of the request."""

    template_marks = ("[func_name1(",)
    needs_special_tokens = True

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._state: Literal["start", "name", "arguments", "separator", "end", "plain"] = "start"
        self._arguments = PythonArguments()

    def accepts(self, name: str) -> bool:
        """Whether the request has a tool with this name."""
        return name in self._schemas

    def _advance(self) -> bool:
        """Read the next element of the format from the held text. False if more text is needed."""
        match self._state:
            case "start":
                return self._detect_start()
            case "name":
                return self._read_name()
            case "arguments":
                return self._push_arguments()
            case "separator":
                return self._read_separator()
            case "end":
                return self._read_end()
            case "plain":
                self._text, self._held = self._text + self._held, ""
                return False

    def _detect_start(self) -> bool:
        """Start the section of calls at [ or <|python_start|>[. Otherwise the answer is plain text, or more text is needed."""
        start = self._held.lstrip()
        if is_partial(start, START):
            return False
        rest = start.removeprefix(START).lstrip()
        if not rest:
            return False
        if not rest.startswith("["):
            self._state = "plain"
            return True
        self._start_section()
        self._consume(len(self._held) - len(rest) + 1)
        self._state = "name"
        return True

    def _read_name(self) -> bool:
        """Read NAME( and open its call. False if more text is needed. Text that is no call of a known tool becomes content."""
        match = _NAME.match(self._held, 0, MAX_HEADER_CHARS)
        if match is not None and self.accepts(match[1]):
            self.open_call(match[1])
            self._consume(match.end())
            self._state, self._arguments = "arguments", PythonArguments()
            return True
        if match is None and len(self._held) < MAX_HEADER_CHARS and _NAME_START.fullmatch(self._held):
            return False
        self._state = "end"
        return True

    def _push_arguments(self) -> bool:
        """Emit the new part of the arguments. True if they have ended and text remains to be read."""
        text, used = self._arguments.push(self._held)
        self.add_arguments(text)
        self._consume(used)
        if self._arguments.done or self._arguments.failed:
            self._state = "separator" if self._arguments.done else "end"
            return True
        return False

    def _read_separator(self) -> bool:
        """Read the comma or the bracket after a call. False if more text is needed."""
        self._skip_space()
        if not self._held:
            return False
        if self._held[0] == ",":
            self._consume(1)
            self._state = "name"
        else:
            self._state = "end"
        return True

    def _read_end(self) -> bool:
        """End the section, with ] and <|python_end|> if a call precedes them."""
        if self._section is None:
            self._skip_space()
            rest = self._held.removeprefix("]").lstrip()
            if is_partial(rest, END):
                return False
            self._consume(len(self._held) - len(rest.removeprefix(END)))
        self._end_section()
        self._state = "plain"
        return True
