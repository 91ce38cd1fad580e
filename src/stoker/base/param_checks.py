"""Checks of the fields of SamplingParams. A value of a wrong type raises RequestTypeError, another wrong value RequestError."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from stoker.base.errors import RequestError, RequestTypeError


def check_lists(params: Any) -> None:
    """Replace `stop`, `stop_token_ids`, `allowed_token_ids` and `bad_words` by tuples. A string is replaced by a tuple of one."""
    _replace_by_tuple(params, "stop", (str,), "a string or a list of strings")
    _replace_by_tuple(params, "stop_token_ids", (int,), "a list of token ids")
    if params.allowed_token_ids is not None:
        _replace_by_tuple(params, "allowed_token_ids", (int,), "a list of token ids")
    noun = "a string, or a list of strings and of lists of token ids"
    _replace_by_tuple(params, "bad_words", (str, list, tuple), noun)
    words = params.bad_words
    if not all(type(token) is int for word in words if not isinstance(word, str) for token in word):
        raise RequestTypeError("bad_words", words, f"it must be {noun}")
    if any(isinstance(word, list) for word in words):
        msgspec.structs.force_setattr(params, "bad_words", tuple(word if isinstance(word, str) else tuple(word) for word in words))


def _replace_by_tuple(params: Any, name: str, types: tuple[type, ...], noun: str) -> None:
    """Replace a list by a tuple. Raises RequestTypeError unless all items have one of `types`; `noun` describes the field."""
    value = getattr(params, name)
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(type(item) in types for item in values):
        raise RequestTypeError(name, value, f"it must be {noun}")
    if type(value) is not tuple:
        msgspec.structs.force_setattr(params, name, tuple(values))


def check_type(params: Any, name: str, expected: type, noun: str) -> None:
    """Raise RequestTypeError unless the field has exactly the type `expected`; `noun` describes it."""
    value = getattr(params, name)
    if type(value) is not expected:
        raise RequestTypeError(name, value, f"it must be {noun}")


def check_numbers_by_token(params: Any, name: str) -> None:
    """Raise an error unless the field is a dictionary from token ids to finite numbers."""
    numbers = getattr(params, name)
    if not isinstance(numbers, dict) or not all(type(key) is int and type(value) in (int, float) for key, value in numbers.items()):
        raise RequestTypeError(name, numbers, "it must be a dictionary of token ids and numbers")
    if wrong := [value for value in numbers.values() if not math.isfinite(value)]:
        raise RequestError(name, wrong[0], "it must be a finite number")


def check_whole_number(params: Any, name: str, low: int, high: int | None = None) -> None:
    """Raise an error unless the field is a whole number from `low` to `high`."""
    value = getattr(params, name)
    if type(value) is not int:
        raise RequestTypeError(name, value, "it must be a whole number")
    if value < low or (high is not None and value > high):
        raise RequestError(name, value, f"it must be between {low} and {high}" if high is not None else f"it must be at least {low}")


def check_number(params: Any, name: str, low: float, high: float, *, above: bool = False) -> None:
    """Raise an error unless the field is a number from `low` to `high`; `low` itself is excluded with `above`."""
    value = getattr(params, name)
    if type(value) not in (int, float):
        raise RequestTypeError(name, value, "it must be a number")
    if math.isnan(value):
        raise RequestError(name, value, "it must be a finite number")
    if not (low < value if above else low <= value) or value > high:
        raise RequestError(name, value, f"it must be {'above' if above else 'at least'} {low:g} and at most {high:g}")
