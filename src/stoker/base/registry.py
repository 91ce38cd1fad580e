"""A table of named rows, such as architectures, formats, policies, protocols and deployment formats."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from stoker.base.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: list[str], n: int = 3) -> list[str]:
    """At most `n` known names that are similar to `name`, most similar first, ignoring case."""
    by_lowercase = {k.lower(): k for k in known}
    return [by_lowercase[k] for k in difflib.get_close_matches(name.lower(), list(by_lowercase), n=n, cutoff=0.5)]


class Registry(Generic[T]):
    """Rows by name, in the order in which they were added. `kind` is the word for a row in error messages, such as "policy"."""

    def __init__(self, kind: str, error: type[ConfigError] = ConfigError) -> None:
        self.kind = kind
        self._error = error
        self._rows: dict[str, T] = {}

    def add(self, name: str, row: T) -> T:
        """Add a row, and return it. Raises ValueError when the name exists."""
        if name in self._rows:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._rows[name] = row
        return row

    def get(self, name: str) -> T:
        """The row called `name`. Raises ConfigError, which suggests similar names, if there is none."""
        try:
            return self._rows[name]
        except KeyError:
            suggestions = nearest(name, list(self._rows)) or list(self._rows)
            raise self._error(f"unknown {self.kind} {name!r}.", cure=f"Use one of: {', '.join(suggestions)}.") from None

    def names(self) -> list[str]:
        """All names, in the order in which they were added."""
        return list(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
