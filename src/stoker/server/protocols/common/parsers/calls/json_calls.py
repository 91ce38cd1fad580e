"""Readers of JSON calls that arrive in chunks: the arguments are emitted before the call is complete."""

from __future__ import annotations

import re
from typing import Any

from stoker.server.protocols.common.parsers.tools.parser import ToolParser, json_text, read_json

MAX_HEADER_CHARS = 2048
_STRING = r'"(?:[^"\\]|\\.)*"'
# The start of a call up to its arguments, if the name precedes them and they are an object.
_HEADER = re.compile(
    rf'\{{\s*(?:"(?:id|type)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL
)


class JsonScanner:
    """Finds the end of one JSON object or array. Stops at `<` outside strings, which starts a marker and is never JSON."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False
        self.broken = False

    def push(self, text: str) -> tuple[str, int]:
        """Add text. Returns (its part of the value, with raw control characters in strings escaped; the number of characters used)."""
        out: list[str] = []
        for index, char in enumerate(text):
            if self._in_string:
                out.append(char if char >= " " else f"\\u{ord(char):04x}")
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                continue
            if char == "<":
                self.broken = True
                return "".join(out), index
            out.append(char)
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return "".join(out), index + 1
        return "".join(out), len(text)


class JsonCall:
    """One object {"name": …, "arguments": {…}}; the key may also be "parameters".

    If the name follows the arguments, or they are JSON text, the call is emitted when the object ends.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._text = ""
        self._object = JsonScanner()
        self._arguments: JsonScanner | None = None
        self._may_have_header = True  # until the text is too long for one
        self.ended = False
        self.failed = False

    def push(self, text: str) -> int:
        """Add text. Returns how many of its characters belong to the object."""
        _, used = self._object.push(text)
        if self._arguments is not None:
            self._push_arguments(text[:used])
        else:
            self._text += text[:used]
            self._read_header()
        self.ended = self._object.done or self._object.broken or self.failed
        if self.ended and self._arguments is None:
            self.failed = self.failed or not self._emit_whole(read_json(self._text))
        return used

    def _read_header(self) -> None:
        """Open the call once its name and the start of its arguments are known."""
        if not self._may_have_header:
            return
        if (match := _HEADER.match(self._text, 0, MAX_HEADER_CHARS)) is None:
            self._may_have_header = len(self._text) < MAX_HEADER_CHARS
            return
        name = read_json(match[1])
        if not isinstance(name, str) or not self._parser.accepts(name):
            self.failed = True
            return
        self._parser.open_call(name)
        self._arguments = JsonScanner()
        self._push_arguments(self._text[match.end() :])

    def _push_arguments(self, text: str) -> None:
        """Emit the part of `text` that belongs to the arguments."""
        assert self._arguments is not None
        if not self._arguments.done:
            self._parser.add_arguments(self._arguments.push(text)[0])

    def _emit_whole(self, value: Any) -> bool:
        """Emit a call that is complete. Returns whether the value is one."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not self._parser.accepts(value["name"]):
            return False
        arguments = value.get("arguments", value.get("parameters"))
        try:
            text = json_text({} if arguments is None else arguments)
        except RecursionError:
            return False
        self._parser.open_call(value["name"])
        self._parser.add_arguments(text)
        return True


class JsonCalls:
    """Any number of call objects, between `opening` and `closing` if these are given, with white space and `separators` between them."""

    def __init__(self, parser: ToolParser, *, opening: str = "", closing: str = "", separators: str = "") -> None:
        self._parser = parser
        self._opening = opening
        self._closing = closing
        self._separators = separators
        self._call: JsonCall | None = None
        self.ended = False  # at `closing`, or before the first character that belongs to no call

    def push(self, text: str) -> int:
        """Add text. Returns how many of its characters belong to the calls; fewer than all only if they have ended."""
        used = 0
        while used < len(text) and not self.ended:
            used += self._push_call(text[used:]) if self._call is not None else self._push_between(text[used])
        return used

    def _push_call(self, text: str) -> int:
        """Give `text` to the current call. Returns how many characters belong to it."""
        assert self._call is not None
        used = self._call.push(text)
        if self._call.ended:
            self.ended = self._call.failed
            self._call = None
        return used

    def _push_between(self, char: str) -> int:
        """1 if the character belongs to the calls and is not the start of one, otherwise 0."""
        if char.isspace() or char in self._separators:
            return 1
        if self._opening:
            self.ended = char != self._opening
            self._opening = ""
            return 0 if self.ended else 1
        if char == "{":
            self._call = JsonCall(self._parser)
            return 0
        self.ended = True
        return 1 if char == self._closing else 0
