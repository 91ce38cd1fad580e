"""What values a foreign setting takes: how to read one from text (properties, environment) or check one from YAML.

Each kind's `read` takes text or an already typed value and returns the value Stoker uses; it raises ValueError whose
message finishes the sentence "KEY=VALUE is refused: ...". With `typed`, text is refused where a number or a boolean is
due, as Truss does.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import msgspec

MAX_TEXT = 4096
_CREDENTIAL = re.compile(r"^\w+://[^/?#]*@|[?&][^=&]*(sig|token|key|secret|password|credential)[^=&]*=", re.IGNORECASE)


class Kind(msgspec.Struct, frozen=True):
    """Any one value of a setting."""

    def read(self, value: Any, *, typed: bool = False) -> Any:
        raise NotImplementedError


class Whole(Kind, frozen=True):
    """A whole number in [low, high]; `words` stand for a value: {"max": None}."""

    low: int = 0
    high: int = 1 << 40
    words: dict[str, Any] = {}

    def read(self, value: Any, *, typed: bool = False) -> Any:
        if isinstance(value, str):
            value = value.strip()
            if value.lower() in self.words:
                return self.words[value.lower()]
            if not typed and value.lstrip("+-").isascii() and value.lstrip("+-").isdigit() and len(value) < 20:
                value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            also = "".join(f", or {word}" for word in self.words)
            raise ValueError(f"it must be a whole number from {self.low} to {self.high}{also}")
        return value


class Real(Kind, frozen=True):
    """A finite number in (low, high]; in [low, high] with `closed`."""

    low: float = 0.0
    high: float = 1e9
    closed: bool = False

    def read(self, value: Any, *, typed: bool = False) -> float:
        number = _real(value, typed)
        if number is None or not (self.low <= number if self.closed else self.low < number) or number > self.high:
            raise ValueError(f"it must be a number {'from' if self.closed else 'above'} {self.low:g} up to {self.high:g}")
        return number


class Flag(Kind, frozen=True):
    """true or false, in any case."""

    def read(self, value: Any, *, typed: bool = False) -> bool:
        if isinstance(value, str) and not typed:
            value = {"true": True, "false": False}.get(value.strip().lower())
        if type(value) is not bool:
            raise ValueError("it must be true or false")
        return value


class Text(Kind, frozen=True):
    """One line of text, not empty unless `empty`."""

    empty: bool = False

    def read(self, value: Any, *, typed: bool = False) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT or any(c in value for c in "\n\r\0"):
            raise ValueError(f"it must be one line of text, at most {MAX_TEXT} characters")
        if not value.strip() and not self.empty:
            raise ValueError("it is empty")
        return value.strip()


class SecretInside(ValueError):
    """A value that must not be printed."""


class Location(Text, frozen=True):
    """A directory, hub id or address. Refuses an address that carries a password or a signature: it would show up in tables."""

    def read(self, value: Any, *, typed: bool = False) -> str:
        text = super().read(value, typed=typed)
        if text.startswith("<") and text.endswith(">"):
            raise ValueError("it is a placeholder; name a directory, a hub id or an s3:// address")
        if _CREDENTIAL.search(text):
            raise SecretInside("the address carries a credential; use s3:// with the usual AWS settings, or download it first")
        return text


class Choice(Kind, frozen=True):
    """One of the names in `meanings`, in any case; the value is what the name means here."""

    meanings: dict[str, Any]

    def read(self, value: Any, *, typed: bool = False) -> Any:
        name = value.strip().lower() if isinstance(value, str) else value
        if not isinstance(name, str) or name not in self.meanings:
            raise ValueError(f"it must be one of {', '.join(self.meanings)}")
        return self.meanings[name]


class Anything(Kind, frozen=True):
    """A value of any shape, passed over or refused as a whole; never printed, since it may hold a secret."""

    hidden: ClassVar[bool] = True

    def read(self, value: Any, *, typed: bool = False) -> Any:
        return value


def names(*words: str) -> Choice:
    """A choice whose names mean themselves."""
    return Choice({word.lower(): word for word in words})


def _real(value: Any, typed: bool) -> float | None:
    if isinstance(value, str) and not typed and len(value) < 40:
        try:
            value = float(value)
        except ValueError:
            return None
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    return float(value)
