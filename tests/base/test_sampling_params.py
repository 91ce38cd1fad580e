"""SamplingParams: every field is documented, lists may be strings, and wrong types and values are refused by name."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import Guide, RequestError, SamplingParams


def test_help_documents_each_field() -> None:
    documented = re.findall(r"^ {8}(\w+): ", SamplingParams.__doc__ or "", re.MULTILINE)
    assert documented == list(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"stop": "\n"}, {"stop": ("\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
        ({"bad_words": "no"}, {"bad_words": ("no",)}),
        ({"bad_words": ["no", [4, 5], (6,)]}, {"bad_words": ("no", (4, 5), (6,))}),
        ({"temperature": 1, "logit_bias": {3: 1}}, {"temperature": 1, "logit_bias": {3: 1}}),
    ],
    ids=str,
)
def test_accepted_types(given: dict[str, Any], stored: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in stored} == stored
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


WRONG: dict[str, tuple[Any, ...]] = {
    "max_tokens": ("5", 5.0, None, True, [5]),
    "n": ("1", 1.5),
    "temperature": ("hot", None, True),
    "top_p": ("0.9",),
    "seed": ("1", 1.5),
    "stop": (5, [5], {"a": 1}, None, [None]),
    "stop_token_ids": ("2", 2, ["2"], [2.0]),
    "allowed_token_ids": ("2", 2, ["2"], {2: 1}),
    "bad_words": (5, [5], [["a"]], [[1.0]], None),
    "logit_bias": ([1], {"a": 1.0}, {1: "x"}, None),
    "ignore_eos": ("no", 1, None),
    "skip_special_tokens": (0,),
    "logprobs": ("1", True),
    "guide": ("a+", {"kind": "regex"}),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=str)
def test_wrong_types_are_type_errors_that_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}=.* is refused: it must be ") as refused:
        SamplingParams(**{name: value})
    assert isinstance(refused.value, RequestError) and refused.value.field == name  # protocols report it with status 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1] * 20_000),
        ("top_p", 1.5),
        ("stop", ""),
        ("temperature", float("nan")),
        ("n", 65),
    ],
)
def test_wrong_values_are_no_type_errors(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name}=") as refused:
        SamplingParams(**{name: value})
    assert not isinstance(refused.value, TypeError)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | st.builds(object),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), ANYTHING, max_size=3))
def test_any_value_is_accepted_or_refused(values: dict[str, Any]) -> None:
    try:
        SamplingParams(**values)
    except RequestError as error:
        assert error.field.partition(".")[0] in values or error.field == "min_tokens"


def test_a_guide_is_checked() -> None:
    assert SamplingParams(guide=Guide("regex", "a+")).guide == Guide("regex", "a+")
    with pytest.raises(RequestError, match=r"guide\.kind='perl' is refused"):
        SamplingParams(guide=Guide("perl", "a+"))
    with pytest.raises(TypeError, match=r"guide\.text=5 is refused: it must be a string"):
        SamplingParams(guide=Guide("regex", 5))  # type: ignore[arg-type]
