"""A named table: the one place where an architecture, format, policy, protocol or deployment format is added."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from stoker.base.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: list[str], n: int = 3) -> list[str]:
    """The `n` known names closest to `name`, best first, without regard to case."""
    folded = {k.lower(): k for k in known}
    return [folded[k] for k in difflib.get_close_matches(name.lower(), list(folded), n=n, cutoff=0.5)]


class Registry(Generic[T]):
    """Rows by name, in the order they were added. `kind` is the word used in messages ("policy")."""

    def __init__(self, kind: str, error: type[ConfigError] = ConfigError) -> None:
        self.kind = kind
        self._error = error
        self._rows: dict[str, T] = {}

    def add(self, name: str, row: T) -> T:
        if name in self._rows:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._rows[name] = row
        return row

    def get(self, name: str) -> T:
        """The row called `name`. Raises ConfigError with the nearest names when there is none."""
        try:
            return self._rows[name]
        except KeyError:
            near = nearest(name, list(self._rows)) or list(self._rows)
            raise self._error(f"unknown {self.kind} {name!r}.", cure=f"Use one of: {', '.join(near)}.") from None

    def names(self) -> list[str]:
        return list(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
