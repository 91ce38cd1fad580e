"""Value types and field tables: accepted values, conversions, and the fields that errors name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stoker.base.errors import RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.table import FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import (
    Anything,
    Choice,
    Flag,
    Line,
    ListOf,
    MappingOf,
    Real,
    Text,
    ValueType,
    Whole,
    exactly,
    names,
)

SIZE = Whole(1, 8, {"max": None})
POLICY = Choice({"static_batch": "static", "auto": None})
DEVICES = ListOf(Whole(0, 7), 4)
BIASES = MappingOf(Whole(0, 1 << 31), Real(-100, 100), noun="token ids")
PYTHON_FLAG = Flag({"True": True, "False": False, "1": True}, exact_case=True)


@pytest.mark.parametrize(
    ("type", "value", "result"),
    [
        (SIZE, 1, 1), (SIZE, 8, 8), (SIZE, 3.0, 3), (SIZE, "max", None), (SIZE, " MAX ", None), (Whole(-5, -1), -3, -3),
        (Real(0, 1), 0, 0.0), (Real(0, 1), 1, 1.0), (Real(0, 1, above=True), 0.5, 0.5), (Flag(), True, True), (Flag(), False, False),
        (Text(2), "ab", "ab"), (Text(), " a\nb ", " a\nb "), (Line(), " a ", "a"), (Line(allow_empty=True), "", ""),
        (POLICY, "Static_Batch", "static"), (POLICY, "auto", None), (names("HF", "S3"), "hf", "HF"), (exactly("a", True), "a", "a"),
        (exactly("a", True), True, True), (Anything(), {"a": [1]}, {"a": [1]}), (DEVICES, [0, 7], (0, 7)), (DEVICES, [], ()),
        (ListOf(Text(), 2, or_one=True), "a", ("a",)), (ListOf(Text(), 2, or_one=True), ["a", "b"], ("a", "b")),
        (MappingOf(), {"a": 1}, {"a": 1}), (BIASES, {"7": 1, "8": -0.5}, {7: 1.0, 8: -0.5}),
    ],
)  # fmt: skip
def test_typed_values(type: ValueType, value: Any, result: Any) -> None:
    found = type.check(value)
    assert found == result and found.__class__ is result.__class__


@pytest.mark.parametrize(
    ("type", "value", "limit"),
    [
        (SIZE, 0, "it must be a whole number from 1 to 8, or max"), (SIZE, 9, "from 1 to 8"), (SIZE, 2.5, "whole"), (SIZE, True, "whole"),
        (SIZE, "4", "whole"), (SIZE, None, "whole"), (Real(0, 1), 1.01, "it must be a number from 0 to 1"), (Real(0, 1), "0.5", "number"),
        (Real(0, 1, above=True), 0, "it must be a number above 0 and at most 1"), (Real(0, 1), math.nan, "number"),
        (Real(0, 1), True, "number"), (Flag(), 1, "it must be true or false"), (Flag(), "true", "true or false"),
        (Text(2), "abc", "it must be a string of at most 2 characters"), (Text(), 5, "string"), (Line(), "a\nb", "one line"),
        (Line(), "  ", "it is empty"), (Line(), 5, "one line"), (Line(), "x" * 5000, "4096"),
        (POLICY, "other", "it must be one of static_batch, auto"), (POLICY, ["auto"], "one of"), (exactly("json"), "JSON", "one of json"),
        (exactly(True), False, "it must be one of true"), (exactly("a"), {}, "one of"),
        (DEVICES, "0", "it must be a list of at most 4 items"), (DEVICES, [0] * 5, "at most 4"), (MappingOf(), [], "it must be an object"),
        (BIASES, {"x": 1}, "its keys must be token ids"),
    ],
)  # fmt: skip
def test_typed_values_that_are_rejected(type: ValueType, value: Any, limit: str) -> None:
    with pytest.raises(InvalidValueError, match=limit):
        type.check(value)


@pytest.mark.parametrize(
    ("type", "text", "result"),
    [
        (SIZE, "8", 8), (SIZE, " +3 ", 3), (SIZE, "Max", None), (Whole(-5, 5), "-5", -5), (Real(0, 1), "0.25", 0.25),
        (Real(), "1e3", 1000.0),
        (Flag(), "TRUE", True), (Flag(), " false ", False), (PYTHON_FLAG, "1", True), (PYTHON_FLAG, "False", False), (Text(), " a ", " a "),
        (Line(), " a ", "a"), (POLICY, " AUTO ", None), (exactly("V1", "v1"), "v1", "v1"), (Anything(), "1", "1"),
        (DEVICES, "0, 1,2", (0, 1, 2)), (ListOf(Whole(), 8, separator=";"), "3;4", (3, 4)),
    ],
)  # fmt: skip
def test_values_in_text(type: ValueType, text: str, result: Any) -> None:
    found = type.parse(text)
    assert found == result and found.__class__ is result.__class__


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (SIZE, "0"), (SIZE, "9"), (SIZE, "3.0"), (SIZE, ""), (SIZE, "٣"), (SIZE, "--3"), (SIZE, "1" * 30), (Real(0, 1), "nan"),
        (Real(), "inf"), (Real(), "x"), (Real(), ""), (Real(0, 1, above=True), "0"), (Flag(), "yes"), (Flag(), "1"), (PYTHON_FLAG, "true"),
        (Line(), ""), (POLICY, "other"), (exactly("V1"), "v1"), (DEVICES, "0,x"), (DEVICES, "0,1,2,3,4"), (DEVICES, ""), (BIASES, "{}"),
    ],
)  # fmt: skip
def test_text_that_is_rejected(type: ValueType, text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"^it (must|is empty)"):
        type.parse(text)


def test_an_error_locates_the_value_inside_lists_and_mappings() -> None:
    nested = ListOf(ListOf(Whole(0, 9), 4), 4)
    with pytest.raises(InvalidValueError) as caught:
        nested.check([[1], [2, 70]])
    assert (caught.value.path, caught.value.value) == ("[1][1]", 70)
    request = caught.value.request_error("stop")
    assert (request.field, request.value, request.status) == ("stop[1][1]", 70, 400)
    assert str(request) == "stop[1][1]=70 is refused: it must be a whole number from 0 to 9."
    with pytest.raises(InvalidValueError) as caught:
        BIASES.check({"5": 101})
    assert caught.value.request_error("logit_bias").field == "logit_bias[5]"


def test_a_configuration_error_names_origin_value_and_cure() -> None:
    with pytest.raises(InvalidValueError) as caught:
        SIZE.parse("many")
    error = caught.value.config_error("max_batch_size", origin="serving.properties:3")
    assert str(error) == (
        "serving.properties:3: max_batch_size=many is refused: it must be a whole number from 1 to 8, or max. Correct the value."
    )
    assert "<dict>" in str(InvalidValueError({"token": "s3cret"}, "it must be text").config_error("env"))
    assert str(InvalidValueError("x" * 200, "it is long").config_error("env")).count("x") == 80


def test_a_hidden_value_is_never_printed() -> None:
    row = rejected("env", "there is no process to set it for", "", type=Anything(hidden=True))
    with pytest.raises(InvalidValueError) as caught:
        row.parse("TOKEN=s3cret")
    for error in (caught.value.request_error("env"), caught.value.config_error("env"), caught.value.within("[0]").config_error("env")):
        assert "s3cret" not in str(error) and "(hidden)" in str(error)
    assert row.hidden and row.parse("") == ""


TABLE = FieldTable([
    accepted("max_tokens", Whole(1, 100), "new tokens at most; 16", "max_tokens"),
    accepted("stream", Flag(), "send tokens as they come"),
    no_effect("user", Text(10), "requests are not grouped by user"),
    rejected("lora_path", "there are no adapters", "", alternative="Merge the adapter into the checkpoint."),
    rejected("suffix", "text is generated at the end only", ""),
])  # fmt: skip


def test_a_table_returns_accepted_fields() -> None:
    fields = {"max_tokens": 5, "stream": None, "user": "me", "lora_path": ""}
    assert TABLE.check(fields) == {"max_tokens": 5}
    assert TABLE.targets() == {"max_tokens": "max_tokens"}
    assert [row.name for row in TABLE] == ["max_tokens", "stream", "user", "lora_path", "suffix"] and len(TABLE) == 5
    assert "user" in TABLE and TABLE["user"].reason and TABLE.get("other") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 101}, "parameters.max_tokens=101 is refused: it must be a whole number from 1 to 100."),
        ({"user": 5}, "parameters.user=5 is refused: it must be a string of at most 10 characters."),
        ({"lora_path": "x"}, "parameters.lora_path='x' is refused: there are no adapters. Merge the adapter into the checkpoint."),
        ({"suffix": "x"}, "parameters.suffix='x' is refused: text is generated at the end only. Leave it out."),
        ({"max_token": 1}, "parameters.max_token=1 is refused: there is no such field. Did you mean max_tokens?"),
        ({"zzz": 1}, "parameters.zzz=1 is refused: there is no such field. Leave it out."),
    ],
)
def test_a_table_rejects_fields_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        TABLE.check(fields, prefix="parameters.")
    assert str(caught.value) == message


def test_a_long_unknown_name_is_truncated() -> None:
    with pytest.raises(RequestError) as caught:
        TABLE.check({"x" * 10_000: 1})
    assert len(str(caught.value)) < 200


def test_two_rows_with_the_same_name_raise() -> None:
    with pytest.raises(ValueError, match="the key stream has two rows"):
        FieldTable([accepted("stream", Flag()), no_effect("stream", Flag(), "twice")], noun="key")
