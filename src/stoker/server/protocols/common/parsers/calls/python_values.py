"""Converts the keyword arguments of a Python call, which arrive in chunks, to the text of a JSON object."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

from stoker.server.protocols.common.parsers.calls.argument_types import json_string

MAX_WORD_CHARS = 256
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_ESCAPE_DIGITS = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits after \x, \u and \U


class PythonArguments:
    """Reads `key="text", other=[1, True])`, what follows the parenthesis of a call, up to its end.

    Strings, numbers, True, False, None, lists, tuples and dictionaries are converted; another word is a string. `failed` is set at text
    of another form.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # the closing characters of open lists, tuples and dictionaries
        self._word = ""  # a keyword, number or name that is not complete
        self._in_keyword = True  # whether the next word is the name of an argument
        self._quote = ""  # of the string that the text is inside of
        self._escape = ""
        self._separator = ""  # is emitted before the next value
        self._has_value = False  # whether the current position follows a value
        self._after_colon = False
        self._num_arguments = 0
        self._out: list[str] = []
        self.done = False
        self.failed = False

    def push(self, text: str) -> tuple[str, int]:
        """Add text. Returns (its part of the JSON object, the number of characters used)."""
        used = 0
        while used < len(text) and not (self.done or self.failed):
            self._add(text[used])
            used += not self.failed
        out, self._out = "".join(self._out), []
        return out, used

    def _add(self, char: str) -> None:
        """Read one character."""
        if self._quote:
            self._add_to_string(char)
        elif self._in_keyword:
            self._add_to_keyword(char)
        elif char in "\"'":
            self._start_string(char)
        elif char.isspace() or char in "()[]{},:":
            self._end_word()
            if not char.isspace():
                self._punctuate(char)
        elif self._has_value or len(self._word) >= MAX_WORD_CHARS:
            self.failed = True
        else:
            self._word += char

    def _add_to_keyword(self, char: str) -> None:
        """Read a character of a keyword, of the space around it, or of the end of the call."""
        if char == "=" and self._word.isidentifier():
            self._out.append(("{" if not self._num_arguments else ", ") + json_string(self._word) + ": ")
            self._num_arguments += 1
            self._word, self._in_keyword = "", False
        elif char == ")" and not self._word:
            self._out.append("}" if self._num_arguments else "{}")
            self.done = True
        elif char.isalnum() or char == "_":
            self._word += char
            self.failed = len(self._word) > MAX_WORD_CHARS
        else:
            self.failed = not char.isspace()

    def _start_string(self, quote: str) -> None:
        """Start a string with the quotation mark `quote`."""
        self.failed = self._has_value or bool(self._word)
        self._quote = quote
        self._emit('"')

    def _add_to_string(self, char: str) -> None:
        """Read a character inside a string: of the text, of an escape, or the closing quotation mark."""
        if self._escape:
            self._escape += char
            if len(self._escape) == 2 + _ESCAPE_DIGITS.get(self._escape[1], 0):
                self._out.append(_json_of_escape(self._escape))
                self._escape = ""
        elif char == "\\":
            self._escape = char
        elif char == self._quote:
            self._quote, self._has_value = "", True
            self._out.append('"')
        else:
            self._out.append(json_string(char)[1:-1])

    def _end_word(self) -> None:
        """Convert a number, True, False, None or a key of a dict, once its last character has been read."""
        if self._word:
            is_key = self._open[-1:] == ["}"] and not self._after_colon
            self._emit(json_string(self._word) if is_key else _json_of_word(self._word))
            self._word, self._has_value = "", True

    def _punctuate(self, char: str) -> None:
        """Read a bracket, comma or colon between values."""
        if char in _CLOSING:
            self.failed = self._has_value
            self._emit("{" if char == "{" else "[")
            self._open.append(_CLOSING[char])
            self._after_colon = False
        elif char in ",:":
            self.failed = not self._has_value or (char == ":" and self._open[-1:] != ["}"])
            self._separator = char + " " if self._open else ""
            self._has_value, self._after_colon, self._in_keyword = False, char == ":", not self._open
        elif self._open:
            self.failed = self._open.pop() != char
            self._out.append("}" if char == "}" else "]")
            self._separator, self._has_value = "", True
        else:
            self.failed = char != ")" or not self._has_value
            self._out.append("}")
            self.done = not self.failed

    def _emit(self, text: str) -> None:
        """Append JSON text, after the separator that belongs before it."""
        self._out.append(self._separator + text)
        self._separator = ""


def _json_of_escape(escape: str) -> str:
    r"""The JSON text of an escape sequence of Python, such as \n or \x41. An unknown one is text."""
    kind, digits = escape[1], escape[2:]
    if not digits:
        return json_string(_ESCAPES.get(kind, escape))[1:-1]
    try:
        return json.dumps(chr(int(digits, 16)))[1:-1]
    except (ValueError, OverflowError):
        return json_string(escape)[1:-1]


def _json_of_word(word: str) -> str:
    """The JSON text of a number, True, False or None. Another word is a string."""
    if word in _WORDS or word in _WORDS.values():
        return _WORDS.get(word, word)
    try:
        value: Any = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return json_string(word)
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return json.dumps(value) if is_number else json_string(word)
