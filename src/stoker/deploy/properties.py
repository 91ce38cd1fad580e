"""Java properties files: read as java.util.Properties.load does, with line numbers; and written so that it reads them.

Reading differs from Java on purpose in three places: the text is UTF-8 (Java reads ISO-8859-1 and garbles it; bytes that are
not UTF-8 are still read that way), a byte-order mark is dropped, and a key given twice is an error.
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
    """One value, with the 1-based number of the line where its key starts."""

    value: str
    line: int


def parse(data: bytes, name: str) -> dict[str, Property]:
    """The properties in `data`, in the order of the file; `name` is the file's name in messages.

    Raises ConfigError for a key given twice (naming both lines), a malformed \\u escape, NUL bytes, UTF-16, or over 1 MiB.
    """
    found: dict[str, Property] = {}
    for number, line in _logical_lines(_decode(data, name)):
        key, value = (_unescape(part, name, number) for part in _split(line))
        if key in found:
            raise ConfigError(
                f"{name} line {number}: {key} is given again; line {found[key].line} gives it already.", cure="Keep one of the two lines."
            )
        found[key] = Property(value, number)
    return found


def line(key: str, value: str) -> str:
    """The line that sets `key`, a plain name, to `value`. It is ASCII: Java takes other bytes for ISO-8859-1."""
    packed = value.encode("utf-16-be")
    units = [chr(int.from_bytes(packed[i : i + 2], "big")) for i in range(0, len(packed), 2)]
    written = "".join(_WRITTEN.get(unit) or (unit if " " <= unit <= "~" else f"\\u{ord(unit):04x}") for unit in units)
    begin = "\\" if written.startswith(" ") else ""
    return f"{key}={begin}{written}\n"


def _decode(data: bytes, name: str) -> str:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} has {len(data)} bytes; a properties file has at most {MAX_BYTES}.", cure="Is it another kind of file?")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data:
        raise ConfigError(f"{name} is not a text file in UTF-8.", cure="Save it as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("iso-8859-1")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines joined at a trailing odd backslash, without comments and blank lines; each with its first line's number."""
    natural = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    held, start = "", 0
    for number, line in enumerate(natural, 1):
        line = line.lstrip(_BLANKS)
        if not held:
            if not line or line[0] in "#!":
                continue
            start = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2 and number < len(natural):
            held += line[:-1]
            if not held:  # a lone backslash: the next line starts afresh
                continue
        else:
            yield start, held + line
            held = ""
    if held:
        yield start, held


def _split(line: str) -> tuple[str, str]:
    """Key and value, still escaped: cut at the first unescaped =, : or blank; one = or : may stand among the blanks."""
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    rest = line[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return line[:end], rest


def _unescape(text: str, name: str, line: int) -> str:
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
    # \uD83D\uDE00 are two halves of one character, as Java stores it
    return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unicode_escape(digits: str, name: str, line: int) -> str:
    if len(digits) != 4 or any(d not in "0123456789abcdefABCDEF" for d in digits):
        raise ConfigError(f"{name} line {line}: \\u{digits} is not an escape.", cure="Write four hexadecimal digits after \\u.")
    return chr(int(digits, 16))
