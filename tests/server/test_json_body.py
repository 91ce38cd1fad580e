"""Large JSON bodies: decoded in steps to the same values as in one call, with a limited number of values."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.server.errors import BodyError
from stoker.server.http import json_body

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(['"', "\\", '\\"', "[1,2]", "\\\\", '"]'])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.lists(NUMBERS, min_size=4, max_size=40)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6), max_leaves=30)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body counts as large, and is decoded in steps of a few bytes."""
    monkeypatch.setattr(json_body, "INLINE_BYTES", 0)
    monkeypatch.setattr(json_body, "STEP_BYTES", 7)
    monkeypatch.setattr(json_body, "LONG_LIST_BYTES", 5)


@pytest.mark.usefixtures("small_steps")
@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", "\t:")]), st.booleans())
@example([[1, 2, 3, 4], {"a": [1.5, -2e9, True, None]}], (",", ":"), True)
def test_the_value_is_the_same_as_in_one_step(value: Any, separators: tuple[str, str], escaped: bool) -> None:
    body = json.dumps(value, separators=separators, ensure_ascii=escaped).encode()
    assert json_body.decode_json(body) == json_body.decode_json(body, long_lists=False) == json.loads(body)


@pytest.mark.usefixtures("small_steps")
@settings(max_examples=150, deadline=None)
@given(VALUES, st.data())
def test_damaged_bodies_are_refused(value: Any, data: st.DataObject) -> None:
    body = bytearray(json.dumps({"a": [1, 2, 3, 4, 5], "b": value}).encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from([b"", b",", b"]", b"[", b'"', b"\\", b"x", b"1"]))
    try:
        expected = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        with pytest.raises(BodyError, match="not JSON"):
            json_body.decode_json(bytes(body))
    else:
        assert json_body.decode_json(bytes(body)) == expected


@pytest.mark.parametrize("item", [b"[]", b"{}", b'""', b'{"a":1}', b"[[1]]"])
def test_a_large_body_has_a_limited_number_of_values(item: bytes) -> None:
    count = json_body.INLINE_BYTES
    with pytest.raises(BodyError, match=f"more than {json_body.MAX_VALUES} strings, lists and objects"):
        json_body.decode_json(b"[" + b",".join([item] * count) + b"]")


def test_numbers_in_short_lists_are_limited_and_long_lists_are_not() -> None:
    numbers = b"[" + b",".join([b"1"] * (2 * json_body.MAX_SHORT_NUMBERS)) + b"]"
    assert len(json_body.decode_json(numbers)) == 2 * json_body.MAX_SHORT_NUMBERS
    short = b"[" + b",".join([b"[" + b",".join([b"1"] * 1000) + b"]"] * 1000) + b"]"
    for body in (short, numbers[:-1]):
        with pytest.raises(BodyError, match=f"more than {json_body.MAX_SHORT_NUMBERS} numbers"):
            json_body.decode_json(body)
    with pytest.raises(BodyError, match=f"more than {json_body.MAX_SHORT_NUMBERS} numbers"):
        json_body.decode_json(numbers, long_lists=False)


def test_no_call_decodes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of msgspec holds the interpreter lock. Strings are copied quickly; other values are decoded in steps."""
    sizes: list[int] = []
    decode = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", lambda data: sizes.append(len(data)) or decode(data))
    ids = list(range(300_000))
    body = {"ids": ids, "lists": [ids[:2000]] * 100, "text": "x"}
    assert json_body.decode_json(json.dumps(body).encode()) == body
    assert sum(sizes) > 2_000_000 and max(sizes) <= json_body.STEP_BYTES + 2
