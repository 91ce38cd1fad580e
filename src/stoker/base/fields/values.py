"""Value types: the values that a field accepts.

A value type has two methods. `check` takes a value that already has a type, as JSON and YAML files give it. `parse` takes text, as
Java properties, environment variables and the string values of a config.pbtxt give it. Both return the value that Stoker uses and
raise `InvalidValueError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from stoker.base.fields.errors import InvalidValueError

MAX_LINE_CHARS = 4096
MAX_NUMBER_CHARS = 40
TRUE_FALSE: Mapping[str, bool] = MappingProxyType({"true": True, "false": False})
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")


class ValueType(Protocol):
    """The interface of all value types, which are immutable."""

    def check(self, value: Any) -> Any:
        """A typed value in Stoker's form. Raises InvalidValueError."""

    def parse(self, text: str) -> Any:
        """The value that `text` represents, in Stoker's form. Raises InvalidValueError."""


class Whole(msgspec.Struct, frozen=True):
    """A whole number from `low` to `high`. A JSON number such as 3.0 counts as 3.

    `words` are words that stand for a value, in any case: {"max": None}.
    """

    low: int = 0
    high: int = 1 << 40
    words: dict[str, Any] = {}

    def check(self, value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() in self.words:
            return self.words[value.strip().lower()]
        number = int(value) if type(value) is float and value.is_integer() else value
        if type(number) is not int or not self.low <= number <= self.high:
            raise InvalidValueError(value, self._limit())
        return number

    def parse(self, text: str) -> Any:
        stripped = text.strip()
        if stripped.lower() in self.words:
            return self.words[stripped.lower()]
        number = int(stripped) if _WHOLE.fullmatch(stripped) else None
        if number is None or not self.low <= number <= self.high:
            raise InvalidValueError(text, self._limit())
        return number

    def contains(self, *numbers: int) -> bool:
        """Whether all these numbers are in range."""
        return all(self.low <= number <= self.high for number in numbers)

    def _limit(self) -> str:
        """The end of the error message."""
        words = "".join(f", or {word}" for word in self.words)
        return f"it must be a whole number from {self.low} to {self.high}{words}"


class Real(msgspec.Struct, frozen=True):
    """A finite number from `low` to `high`; `low` itself is excluded with `above`. The result is a float."""

    low: float = 0.0
    high: float = 1e9
    above: bool = False

    def check(self, value: Any) -> float:
        if type(value) not in (int, float) or not self._contains(value):
            raise InvalidValueError(value, self._limit())
        return float(value)

    def parse(self, text: str) -> float:
        try:
            number = float(text) if len(text) < MAX_NUMBER_CHARS else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or not self._contains(number):
            raise InvalidValueError(text, self._limit())
        return number

    def _contains(self, number: float) -> bool:
        """Whether the number is in range."""
        return (self.low < number if self.above else self.low <= number) and number <= self.high

    def _limit(self) -> str:
        """The end of the error message."""
        if self.above:
            return f"it must be a number above {self.low:g} and at most {self.high:g}"
        return f"it must be a number from {self.low:g} to {self.high:g}"


class Flag(msgspec.Struct, frozen=True):
    """true or false. `words` are the accepted spellings in text, in lower case and matched in any case; as they are with `exact_case`."""

    words: Mapping[str, bool] = TRUE_FALSE
    exact_case: bool = False

    def check(self, value: Any) -> bool:
        if type(value) is not bool:
            raise InvalidValueError(value, "it must be true or false")
        return value

    def parse(self, text: str) -> bool:
        word = text if self.exact_case else text.strip().lower()
        if word not in self.words:
            raise InvalidValueError(text, "it must be true or false")
        return self.words[word]


class Text(msgspec.Struct, frozen=True):
    """Text of `min_chars` to `max_chars` characters, unchanged."""

    max_chars: int = 1 << 24
    min_chars: int = 0

    def check(self, value: Any) -> str:
        """The text, if it has `min_chars` to `max_chars` characters. Raises InvalidValueError."""
        if type(value) is not str or not self.min_chars <= len(value) <= self.max_chars:
            size = f"{self.min_chars} to {self.max_chars}" if self.min_chars else f"at most {self.max_chars}"
            raise InvalidValueError(value, f"it must be a string of {size} characters")
        return value

    def parse(self, text: str) -> str:
        return self.check(text)


class Line(msgspec.Struct, frozen=True):
    """One line of text without surrounding white space; not empty unless `allow_empty`.

    A subclass can override `check` to accept fewer values; `parse` follows.
    """

    allow_empty: bool = False

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > MAX_LINE_CHARS or any(char in value for char in "\n\r\0"):
            raise InvalidValueError(value, f"it must be one line of text, at most {MAX_LINE_CHARS} characters")
        stripped = value.strip()
        if not stripped and not self.allow_empty:
            raise InvalidValueError(value, "it is empty")
        return stripped

    def parse(self, text: str) -> str:
        return self.check(text)


class Choice(msgspec.Struct, frozen=True):
    """One of the keys of `meanings`. The result is the meaning of the key, which is matched in any case unless `exact_case`.

    Without `exact_case` the keys must be lower-case strings.
    """

    meanings: Mapping[Any, Any]
    exact_case: bool = False
    unsupported: Mapping[Any, str] = {}

    def check(self, value: Any) -> Any:
        name = value if self.exact_case or not isinstance(value, str) else value.strip().lower()
        for known, meaning in self.meanings.items():
            if known == name:
                return meaning
        known_names = f"one of {', '.join(map(_spelled, self.meanings))}"
        if isinstance(name, str) and name in self.unsupported:
            raise InvalidValueError(value, self.unsupported[name], cure=f"Use {known_names}.")
        raise InvalidValueError(value, f"it must be {known_names}")

    def parse(self, text: str) -> Any:
        return self.check(text)


class Anything(msgspec.Struct, frozen=True):
    """A value of any type, unchanged. A `hidden` value may contain secrets, and errors do not contain it."""

    hidden: bool = False

    def check(self, value: Any) -> Any:
        return value

    def parse(self, text: str) -> str:
        return text


class ListOf(msgspec.Struct, frozen=True):
    """A list of at most `max_items` values of one type; the result is a tuple.

    With `or_one`, a single value stands for a list of one. In text, items are separated by `separator`.
    """

    item: ValueType
    max_items: int
    or_one: bool = False
    separator: str = ","

    def check(self, value: Any) -> tuple[Any, ...]:
        if self.or_one and not isinstance(value, list):
            return (self.item.check(value),)
        if not isinstance(value, list) or len(value) > self.max_items:
            raise InvalidValueError(value, f"it must be a list of at most {self.max_items} items")
        if type(self.item) is Whole and set(map(type, value)) <= {int} and (not value or self.item.contains(min(value), max(value))):
            return tuple(value)  # the checks below would take 0.2 µs per item
        checked = []
        for index, item in enumerate(value):
            try:
                checked.append(self.item.check(item))
            except InvalidValueError as error:
                raise error.within(f"[{index}]") from None
        return tuple(checked)

    def parse(self, text: str) -> tuple[Any, ...]:
        parts = text.split(self.separator)
        if len(parts) > self.max_items:
            raise InvalidValueError(text, f"it must list at most {self.max_items} values, separated by {self.separator!r}")
        return tuple(self.item.parse(part.strip()) for part in parts)


class MappingOf(msgspec.Struct, frozen=True):
    """A mapping. Its keys are text (in JSON they are always strings) and are parsed with `keys`; its values are checked with `values`.

    `noun` names the keys in an error: "token ids". There are at most `max_items` keys.
    """

    keys: ValueType = Text()
    values: ValueType = Anything()
    noun: str = "strings"
    max_items: int = 1 << 14

    def check(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise InvalidValueError(value, "it must be an object")
        if len(value) > self.max_items:
            raise InvalidValueError(value, f"it has {len(value)} keys, and the limit is {self.max_items}")
        checked = {}
        for key, item in value.items():
            try:
                name = self.keys.parse(key)
            except InvalidValueError:
                raise InvalidValueError(key, f"its keys must be {self.noun}") from None
            try:
                checked[name] = self.values.check(item)
            except InvalidValueError as error:
                raise error.within(f"[{key}]") from None
        return checked

    def parse(self, text: str) -> dict[Any, Any]:
        raise InvalidValueError(text, "it must be an object, which text cannot express")


def names(*words: str) -> Choice:
    """A choice of words in any case. The result is the word as it is written here."""
    return Choice({word.lower(): word for word in words})


def exactly(*values: Any) -> Choice:
    """A choice of exactly these values. The result is the value itself."""
    return Choice({value: value for value in values}, exact_case=True)


def _spelled(name: Any) -> str:
    """A value as it is written in JSON."""
    return str(name).lower() if isinstance(name, bool) else str(name)
