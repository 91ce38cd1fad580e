"""Reads protobuf text format into plain data with line numbers, and writes it.

The reader accepts more than that of protobuf: `${name}` everywhere, and any number of commas and semicolons between fields and
elements. Size and depth are limited, so that every malformed file ends in an error.
Grammar: https://protobuf.dev/reference/protobuf/textformat-spec/
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stoker.base.errors import ConfigError
from stoker.deploy.deployment import Origin, PlacedError

MAX_BYTES = 1 << 20  # the longest template has 30 KiB
MAX_DEPTH = 32

_TOKEN = re.compile(
    r"""(?P<space>[\s,;]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
      | (?P<mark>[{}\[\]<>:])
      | (?P<word>(?:\$\{[^}\n]*\}|[^\s,;:{}\[\]<>\#"'])+)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_CONTROL = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_CLOSING = {"{": "}", "<": ">"}
_PLACEHOLDER = re.compile(r"\$\{([^}\n]*)\}")


class Scalar(msgspec.Struct, frozen=True):
    """A value as text. The caller, which knows its type, parses numbers, booleans and enum names."""

    text: str
    line: int
    quoted: bool = False

    @property
    def unfilled(self) -> list[str]:
        """The names of the template variables (${name}) in the value."""
        return _PLACEHOLDER.findall(self.text)


class MessageField(NamedTuple):
    """A field of a message and the line of its name."""

    name: str
    value: Scalar | Message
    line: int


class Message(msgspec.Struct, frozen=True):
    """Fields in the order of the file. A list `[a, b]` is a repeated field."""

    line: int
    fields: list[MessageField]

    def all(self, name: str) -> list[Scalar | Message]:
        """All values of a field."""
        return [f.value for f in self.fields if f.name == name]

    def messages(self, name: str) -> list[Message]:
        """All values of a field that are messages."""
        return [v for v in self.all(name) if isinstance(v, Message)]

    def scalars(self, name: str) -> list[Scalar]:
        """All values of a field that are not messages."""
        return [v for v in self.all(name) if isinstance(v, Scalar)]

    def scalar(self, name: str) -> Scalar | None:
        """The last value of a field, as in protobuf; None if it has none."""
        found = self.scalars(name)
        return found[-1] if found else None

    def message(self, name: str) -> Message:
        """The last message that is the value of the field `name`. An empty one if there is none."""
        found = self.messages(name)
        return found[-1] if found else Message(self.line, [])

    def walk(self) -> Iterator[MessageField]:
        """Every field of the message and of the messages in it."""
        for field in self.fields:
            yield field
            if isinstance(field.value, Message):
                yield from field.value.walk()


def read_message(path: Path) -> Message:
    """Parse a file. Raises ConfigError naming file and line."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", cure="Check the path and its permissions.") from None
    if size > MAX_BYTES:
        raise ConfigError(f"{path} has {size} bytes, more than {MAX_BYTES}.", cure="Check that it is a model configuration.")
    try:
        return parse(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlacedError(Origin(str(path), line), "the text is not UTF-8.", "Save the file as UTF-8.") from None


def parse(text: str, source: str = "<text>") -> Message:
    """Parse a whole message. Raises ConfigError naming `source` and the line."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source} has {len(text)} characters, more than {MAX_BYTES}.", cure="Check that it is a model configuration.")
    return _Parser(text, source).whole()


class _Parser:
    """A recursive-descent parser with one token of look-ahead."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.text = text
        self.line = 1
        self.tokens = self._tokens()
        self.kind, self.token = "", ""
        self.next()

    def _tokens(self) -> Iterator[tuple[str, str]]:
        """(kind, text) of each token. Raises PlacedError for an invalid character."""
        position = 0
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise self.error("a string does not end on its line", "Add the closing quotation mark.")
            if match.lastgroup != "space":
                yield str(match.lastgroup), match.group()
            self.line += match.group().count("\n")
            position = match.end()
        while True:
            yield "end", ""

    def next(self) -> None:
        """Read the next token."""
        self.kind, self.token = next(self.tokens)

    def error(self, what: str, cure: str) -> PlacedError:
        """An error at the current line."""
        return PlacedError(Origin(self.source, self.line), f"{what}.", cure)

    def whole(self) -> Message:
        """Parse the whole file as one message."""
        message = Message(1, self.fields("", 0))
        if self.kind != "end":
            raise self.error(f"{self.token!r} closes no bracket", "Remove it, or open its bracket.")
        return message

    def fields(self, closing: str, depth: int) -> list[MessageField]:
        """Parse fields up to `closing` (which is not consumed) or the end of the file."""
        if depth > MAX_DEPTH:
            raise self.error(f"messages are nested more than {MAX_DEPTH} deep", "A model configuration has five levels.")
        found: list[MessageField] = []
        while self.kind == "word":
            name, line = self.token, self.line
            self.next()
            found += [MessageField(name, value, line) for value in self.values(name, depth)]
        if self.token != closing and self.kind != "end":
            raise self.error(f"{self.token!r} is in the place of a field name", "Write field: value.")
        return found

    def values(self, name: str, depth: int) -> list[Scalar | Message]:
        """Parse the values of a field after its name."""
        colon = self.token == ":" and self.kind == "mark"
        if colon:
            self.next()
        if self.token == "[" and self.kind == "mark":
            return self.list(name, depth)
        if not colon and self.token not in _CLOSING:
            raise self.error(f"{name} has no value", f"Write {name}: value.")
        return [self.value(name, depth)]

    def list(self, name: str, depth: int) -> list[Scalar | Message]:
        """Parse the values of a list."""
        opened = self.line
        self.next()
        found: list[Scalar | Message] = []
        while not (self.kind == "mark" and self.token == "]"):
            if self.kind == "end":
                raise self.error(f"the list {name}, opened in line {opened}, is not closed", "Add the missing ].")
            found.append(self.value(name, depth))
        self.next()
        return found

    def value(self, name: str, depth: int) -> Scalar | Message:
        """Parse a single value."""
        if self.kind == "string":
            return self.string()
        if self.kind == "word":
            scalar = Scalar(self.token, self.line)
            self.next()
            return scalar
        if self.kind == "mark" and self.token in _CLOSING:
            return self.message(name, depth)
        raise self.error(
            f"{name} has no value" if self.kind == "end" else f"{self.token!r} is not a value of {name}", f"Write {name}: value."
        )

    def string(self) -> Scalar:
        """Parse a string. Adjacent strings are concatenated."""
        line, parts = self.line, []
        while self.kind == "string":
            parts.append(_ESCAPE.sub(_unescape, self.token[1:-1]))
            self.next()
        return Scalar("".join(parts), line, quoted=True)

    def message(self, name: str, depth: int) -> Message:
        """Parse a message in brackets."""
        closing, opened = _CLOSING[self.token], self.line
        self.next()
        fields = self.fields(closing, depth + 1)
        if self.kind == "end":
            raise self.error(f"{name}, opened in line {opened}, is not closed", f"Add the missing {closing}.")
        self.next()
        return Message(opened, fields)


def _unescape(match: re.Match[str]) -> str:
    """The character of an escape sequence."""
    octal, hexadecimal, short, long, other = match.groups()
    if other is not None:
        return _CONTROL.get(other, other)
    code = int(octal, 8) if octal else int(hexadecimal or short or long, 16)
    return chr(code) if code <= 0x10FFFF else "�"


class Word(str):
    """A value that is written without quotation marks, such as the name of an enum value."""


def format_message(data: dict[str, Any], indent: int = 0) -> str:
    """Protobuf text format for plain data: dict → message, list → repeated field, str → string, Word → enum."""
    return "".join(_field(name, value, "  " * indent, indent) for name, value in data.items())


def _field(name: str, value: Any, pad: str, indent: int) -> str:
    """One field as text."""
    if isinstance(value, dict):
        return f"{pad}{name} {{\n{format_message(value, indent + 1)}{pad}}}\n"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        items = ",\n".join(f"{pad}  {{\n{format_message(item, indent + 2)}{pad}  }}" for item in value)
        return f"{pad}{name} [\n{items}\n{pad}]\n"
    if isinstance(value, (list, tuple)):
        return f"{pad}{name}: [{', '.join(map(_scalar, value))}]\n"
    return f"{pad}{name}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    """One value as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Word):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
        return f'"{escaped}"'
    return str(value)
