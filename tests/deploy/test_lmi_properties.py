"""The properties reader compared with java.util.Properties.load (stored results of OpenJDK 17) and a recorded DJL server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.deploy.syntax.properties import MAX_BYTES, format_line, parse

JAVA_PROPERTIES = pytest.mark.compatibility(
    protocol="LMI and SageMaker", client="java.util.Properties", version="17", feature="serving.properties are read as Java reads them"
)

JAVA = json.loads(Path(__file__).with_name("lmi_java_properties.json").read_text())


def values(data: bytes) -> dict[str, str]:
    return {key: entry.value for key, entry in parse(data, "f").items()}


@pytest.mark.parametrize("text, pairs", JAVA, ids=range(len(JAVA)))
@JAVA_PROPERTIES
def test_equals_java(text: str, pairs: list | None) -> None:
    if pairs is None:
        with pytest.raises(ConfigError, match="is not an escape"):
            parse(text.encode(), "f")
    else:
        assert values(text.encode()) == dict(pairs)


@JAVA_PROPERTIES
def test_recorded_file() -> None:
    # the file of the recording "serving.properties + OPTION_*"; UTF-8 text is read as UTF-8, unlike in Java
    data = (
        "# a comment\n! another comment\noption.colon:with colon\noption.space    with space\noption.escaped\\ key=v\n"
        "option.unicode=gr\\u00fc\\u00df\noption.raw_utf8=grüß\noption.continued=a,\\\n    b,\\\n    c\n"
        "option.backslash=C:\\\\dir\\tTab\noption.single_backslash=a\\qb\noption.trailing=keep trailing   \n"
        'option.dollar=${HOME_LIKE}\noption.stop=["a", "b"]\noption.empty=\n'
    ).encode()
    assert values(data) == {
        "option.colon": "with colon",
        "option.space": "with space",
        "option.escaped key": "v",
        "option.unicode": "grüß",
        "option.raw_utf8": "grüß",
        "option.continued": "a,b,c",
        "option.backslash": "C:\\dir\tTab",
        "option.single_backslash": "aqb",
        "option.trailing": "keep trailing   ",
        "option.dollar": "${HOME_LIKE}",
        "option.stop": '["a", "b"]',
        "option.empty": "",
    }


def test_windows_line_ends_and_byte_order_mark() -> None:
    entries = parse(b"\xef\xbb\xbf# hello\r\n\r\na=1\r\nb=2,\\\r\n  3\r\nc=4\r\n", "f")
    assert [(key, e.value, e.line) for key, e in entries.items()] == [("a", "1", 3), ("b", "2,3", 4), ("c", "4", 6)]


def test_bytes_that_are_not_utf8_are_latin1() -> None:
    assert values(b"a=gr\xfc\xdf") == {"a": "grüß"}


def test_surrogate_halves_become_one_character() -> None:
    assert values(rb"a=\uD83D\uDE00") == {"a": "😀"}


def test_duplicate_names_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"f line 4: a is a duplicate; line 2 sets it already"):
        parse(b"# x\na=1\nb=2\na=1\n", "f")


@pytest.mark.parametrize("data", ["a=1".encode("utf-16"), b"a=\0", b"\xfe\xff\0a"])
def test_not_a_text_file(data: bytes) -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        parse(data, "f")


def test_too_large() -> None:
    with pytest.raises(ConfigError, match="at most"):
        parse(b"#" * (MAX_BYTES + 1), "f")


def escape(text: str) -> str:
    return "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in text)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text(st.characters(exclude_categories=["Cs"]))))
def test_escaped_text_is_read_back(expected: dict[str, str]) -> None:
    assert values("\n".join(f"{escape(k)}={escape(v)}" for k, v in expected.items()).encode()) == expected


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_formatted_lines_are_ascii_and_read_back(text: str) -> None:
    written = format_line("option.key", text)
    assert written.isascii() and written.count("\n") == 1
    assert values(written.encode()) == {"option.key": text}


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    try:
        lines = [entry.line for entry in parse(data, "f").values()]
    except ConfigError:
        return
    assert lines == sorted(lines)
