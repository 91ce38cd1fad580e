"""Reads Java properties files like java.util.Properties.load, with line numbers, and writes lines that Java reads.

Three things differ from Java on purpose. Text is UTF-8; Java reads ISO-8859-1, which is used here only for bytes that are not UTF-8.
A byte-order mark is dropped. A duplicate key is an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stoker.base.errors import ConfigError

MAX_BYTES = 1 << 20
_BLANKS = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_WRITTEN = {"\\": "\\\\"} | {plain: f"\\{letter}" for letter, plain in _ESCAPES.items()}


class Property(msgspec.Struct, frozen=True):
    """One value, and the number of the line where its key starts, counted from 1."""

    value: str
    line: int


def parse(data: bytes, name: str) -> dict[str, Property]:
    """The properties in `data` in the order of the file. `name` is the name of the file in messages.

    Raises ConfigError for a duplicate key (with both lines), a malformed \\u escape, NUL bytes, UTF-16, and more than 1 MiB.
    """
    found: dict[str, Property] = {}
    for number, line in _logical_lines(_decode(data, name)):
        key, value = (_unescape(part, name, number) for part in _split(line))
        if key in found:
            raise ConfigError(
                f"{name} line {number}: {key} is a duplicate; line {found[key].line} sets it already.", cure="Keep one of the two lines."
            )
        found[key] = Property(value, number)
    return found


def format_line(key: str, value: str) -> str:
    """The line that sets `key`, a plain name, to `value`. It is ASCII, because Java reads other bytes as ISO-8859-1."""
    packed = value.encode("utf-16-be")
    units = [chr(int.from_bytes(packed[i : i + 2], "big")) for i in range(0, len(packed), 2)]
    written = "".join(_WRITTEN.get(unit) or (unit if " " <= unit <= "~" else f"\\u{ord(unit):04x}") for unit in units)
    begin = "\\" if written.startswith(" ") else ""
    return f"{key}={begin}{written}\n"


def _decode(data: bytes, name: str) -> str:
    """The text of a file. Raises ConfigError for NUL bytes, UTF-16 or too many bytes."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name} has {len(data)} bytes; a properties file has at most {MAX_BYTES}.", cure="Check that it is a properties file."
        )
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data:
        raise ConfigError(f"{name} is not a text file in UTF-8.", cure="Save it as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("iso-8859-1")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, text) of each logical line: continuation lines are merged, comments and blank lines dropped."""
    natural = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    joined, start = "", 0
    for number, line in enumerate(natural, 1):
        line = line.lstrip(_BLANKS)
        if not joined:
            if not line or line[0] in "#!":
                continue
            start = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2 and number < len(natural):
            joined += line[:-1]
            if not joined:  # a line with only a backslash: the next line starts a new entry
                continue
        else:
            yield start, joined + line
            joined = ""
    if joined:
        yield start, joined


def _split(line: str) -> tuple[str, str]:
    """(key, value), both still escaped, separated by the first unescaped =, : or blank. One = or : may be between blanks."""
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    rest = line[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return line[:end], rest


def _unescape(text: str, name: str, line: int) -> str:
    r"""The text without escapes. Raises ConfigError for a malformed \u escape."""
    out, i = [], 0
    while i < len(text):
        if text[i] != "\\":
            out.append(text[i])
            i += 1
        elif text[i + 1 : i + 2] == "u":
            out.append(_unicode_escape(text[i + 2 : i + 6], name, line))
            i += 6
        else:
            out.append(_ESCAPES.get(text[i + 1 : i + 2], text[i + 1 : i + 2]))
            i += 2
    # two escapes can be a surrogate pair, such as \uD83D\uDE00, as Java stores characters
    return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unicode_escape(digits: str, name: str, line: int) -> str:
    r"""The character of a \u escape. Raises ConfigError for a malformed one."""
    if len(digits) != 4 or any(d not in "0123456789abcdefABCDEF" for d in digits):
        raise ConfigError(f"{name} line {line}: \\u{digits} is not an escape.", cure="Write four hexadecimal digits after \\u.")
    return chr(int(digits, 16))
