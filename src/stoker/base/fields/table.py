"""Tables of fields: every name that a request or configuration may use is accepted, without effect, or rejected with a reason.

Nothing is silently ignored: a name without a row is an error that suggests the nearest names. The tables are also the source of
the documentation (`scripts/tables.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec

from stoker.base.errors import RequestError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.values import Anything, ValueType
from stoker.base.registry import nearest

Status = Literal["accepted", "no effect", "rejected"]

ANYTHING = Anything()
MAX_NAME_CHARS = 80


class FieldRow(msgspec.Struct, frozen=True, kw_only=True):
    """One field. Use the functions `accepted`, `no_effect` and `rejected` to create rows.

    `target` is the destination of an accepted field's value, in the terms of the table's owner: the name of a SamplingParams field, or a
    place such as "limits.max_batch_size". It is empty when the owner reads the field itself. `harmless` are values of a rejected field that
    request nothing and are therefore allowed.
    """

    name: str
    status: Status
    type: ValueType = ANYTHING
    meaning: str = ""  # accepted: what it does, and its default
    target: str = ""  # accepted
    reason: str = ""  # no effect, rejected: why
    alternative: str = ""  # rejected: what to do instead, as a sentence
    harmless: tuple[Any, ...] = ()  # rejected

    @property
    def hidden(self) -> bool:
        """Whether the value may contain secrets, so that messages must not contain it."""
        return isinstance(self.type, Anything) and self.type.hidden

    def check(self, value: Any) -> Any:
        """The checked value in Stoker's form, from a typed value such as one of JSON.

        Raises InvalidValueError for a wrong value, and for a rejected field unless the value is harmless.
        """
        return self._allowed(self.type.check(value), value)

    def parse(self, text: str) -> Any:
        """The value that `text` stands for, checked, in Stoker's form.

        Raises InvalidValueError also for a rejected field, unless it is harmless.
        """
        return self._allowed(self.type.parse(text), text)

    def _allowed(self, checked: Any, given: Any) -> Any:
        """`checked`, unless the field is rejected and the value not harmless: then raises InvalidValueError."""
        if self.status == "rejected" and checked not in self.harmless:
            raise InvalidValueError(given, self.reason, cure=self.alternative or "Leave it out.", hidden=self.hidden)
        return checked


def accepted(name: str, type: ValueType, meaning: str = "", target: str = "") -> FieldRow:
    """A field whose value is used."""
    return FieldRow(name=name, status="accepted", type=type, meaning=meaning, target=target)


def no_effect(name: str, type: ValueType, reason: str) -> FieldRow:
    """A field that is checked and then ignored, for the documented `reason`."""
    return FieldRow(name=name, status="no effect", type=type, reason=reason)


def rejected(name: str, reason: str, *harmless: Any, type: ValueType = ANYTHING, alternative: str = "") -> FieldRow:
    """A field that Stoker does not support. Any value other than the `harmless` ones is an error."""
    return FieldRow(name=name, status="rejected", type=type, reason=reason, alternative=alternative, harmless=harmless)


Row = TypeVar("Row", bound=FieldRow)


class FieldTable(Generic[Row]):
    """Rows by name. `noun` is the word for a field in error messages. Raises ValueError when two rows have the same name."""

    def __init__(self, rows: Iterable[Row], *, noun: str = "field") -> None:
        self._rows: dict[str, Row] = {}
        self._noun = noun
        for row in rows:
            if row.name in self._rows:
                raise ValueError(f"the {noun} {row.name} has two rows")
            self._rows[row.name] = row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def get(self, name: str) -> Row | None:
        """The row called `name`, or None."""
        return self._rows.get(name)

    def targets(self) -> dict[str, str]:
        """The targets of the accepted fields that have one, by name."""
        return {row.name: row.target for row in self if row.target}

    def suggestion(self, name: str, otherwise: str) -> str:
        """A sentence with the names that are similar to `name`, or `otherwise` if there are none."""
        near = nearest(name, list(self._rows))
        return f"Did you mean {' or '.join(near)}?" if near else otherwise

    def check(self, given: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
        """The accepted fields of a request with their checked values. A null value counts as absent.

        `prefix` precedes names in errors, such as "parameters.". Raises RequestError for an unknown name, a wrong value and a rejected
        field.
        """
        values = {}
        for name, value in given.items():
            row = self._rows.get(name)
            if row is None:
                cure = self.suggestion(name, "Leave it out.")
                raise RequestError(f"{prefix}{name[:MAX_NAME_CHARS]}", value, f"there is no such {self._noun}", cure=cure)
            if value is None:
                continue
            try:
                checked = row.check(value)
            except InvalidValueError as error:
                raise error.request_error(f"{prefix}{name}") from None
            if row.status == "accepted":
                values[name] = checked
        return values
