"""Kinds of JSON values, as checks: each returns the value or raises RequestError with the field's name, the value and the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.base.errors import RequestError

Kind = Callable[[str, Any], Any]


def anything(name: str, value: Any) -> Any:
    return value


def boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise RequestError(name, value, "it must be true or false")
    return value


def whole(low: int, high: int) -> Kind:
    """A whole number in [low, high]; 3.0 counts as 3."""

    def check(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise RequestError(name, value, f"it must be a whole number from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Kind:
    """A number in [low, high]. JSON has no NaN and no infinity."""

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise RequestError(name, value, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    return check


def text(max_chars: int = 1 << 24) -> Kind:
    def check(name: str, value: Any) -> str:
        if type(value) is not str or len(value) > max_chars:
            raise RequestError(name, value, f"it must be a string of at most {max_chars} characters")
        return value

    return check


def one_of(*choices: Any) -> Kind:
    def check(name: str, value: Any) -> Any:
        if value not in choices:
            raise RequestError(name, value, f"it must be one of {', '.join(map(repr, choices))}")
        return value

    return check


def mapping(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise RequestError(name, value, "it must be an object")
    return value


def list_of(kind: Kind, max_items: int) -> Kind:
    def check(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > max_items:
            raise RequestError(name, value, f"it must be a list of at most {max_items}")
        return tuple(kind(f"{name}[{i}]", item) for i, item in enumerate(value))

    return check


def one_or_list_of(kind: Kind, max_items: int) -> Kind:
    """A list, or one value that stands for a list of one."""
    several = list_of(kind, max_items)
    return lambda name, value: several(name, value) if type(value) is list else (kind(name, value),)


def token_biases(name: str, value: Any) -> dict[int, float]:
    """OpenAI's logit_bias: token ids, as JSON keys, to numbers from -100 to 100."""
    bias, biases = number(-100, 100), {}
    for key, given in mapping(name, value).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError(name, key, "its keys must be token ids")
        biases[int(key)] = bias(f"{name}[{key}]", given)
    return biases
