"""A foreign configuration as one declarative table: each key is honoured, has no effect for a stated reason, or is refused.

A format declares its keys as `Field` rows, puts every value it finds through `Fields.put`, and builds its Deployment from
what was collected. Nothing is silently ignored: a key that is in no row is an error that names the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from stoker.base.errors import ConfigError
from stoker.base.registry import nearest
from stoker.deploy.deployment import Note, Origin, Setting
from stoker.deploy.kinds import Anything, Kind, SecretInside

SECRET = "(hidden)"
_SECTIONS = {
    "build": "build",
    "limits": "build",
    "mapping": "build",
    "quantization": "build",
    "extra": "build",
    "engine": "build",
    "runtime": "runtime",
}


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a foreign configuration. Exactly one of `to`, `no_effect` and `refused` is set.

    `to` is the place of an honoured value: build.NAME, limits.NAME, mapping.NAME, quantization.NAME (a setting of the quantization),
    extra.NAME, runtime.NAME, server.NAME or options.NAME. `harmless` are values of a refused key that ask for nothing.
    """

    key: str
    kind: Kind
    to: str = ""
    no_effect: str = ""
    refused: str = ""
    harmless: tuple[Any, ...] = ()
    hint: str = ""  # what to do instead of a refused key
    also: str = ""  # what a reader of the documentation must know of an honoured key: its default, its conditions

    @property
    def fate(self) -> str:
        """honoured, no effect or refused: the word in the documentation."""
        return "honoured" if self.to else "no effect" if self.no_effect else "refused"


def honoured(key: str, kind: Kind, to: str, also: str = "") -> Field:
    return Field(key=key, kind=kind, to=to, also=also)


def no_effect(key: str, kind: Kind, reason: str) -> Field:
    return Field(key=key, kind=kind, no_effect=reason)


def refused(key: str, kind: Kind, reason: str, *harmless: Any, hint: str = "") -> Field:
    return Field(key=key, kind=kind, refused=reason, harmless=harmless, hint=hint)


class Found(msgspec.Struct, frozen=True):
    """One key as it was found in a file or the environment; `spelled` is how the person wrote it, when not as `key`."""

    key: str
    value: Any
    origin: Origin
    spelled: str = ""


class Collected:
    """What a configuration asks for, by place, with the rows and notes to show. One is filled for each load."""

    def __init__(self, table: dict[str, Field], *, typed: bool = False) -> None:
        self._table = table
        self._typed = typed
        self._by_place: dict[str, Setting] = {}
        self.settings: list[Setting] = []
        self.notes: list[Note] = []

    def put(self, key: str, value: Any, origin: Origin, *, spelled: str = "") -> None:
        """Take one value. `spelled` is the key as the person wrote it (OPTION_DTYPE), when that differs.

        Raises ConfigError for an unknown key, a value of the wrong kind, a refused key, or a place that is set twice differently.
        """
        shown = spelled or key
        field = self._table.get(key) or self._unknown(key, shown, origin)
        try:
            read = field.kind.read(value, typed=self._typed)
        except ValueError as error:
            told = SECRET if isinstance(error, SecretInside) else value
            raise refusal(origin, shown, told, f"{error}", field.hint or "Correct the value.") from None
        if field.to and read is None:
            self.note(shown, "it leaves the choice to Stoker", origin)
        elif field.to:
            self.set(field.to, read, origin, shown)
        elif field.no_effect:
            self.note(shown, field.no_effect, origin)
        elif read not in field.harmless:
            what = shown if isinstance(field.kind, Anything) else f"{shown}={value}"
            raise ConfigError(f"{origin}: {what} is refused: {field.refused}.", cure=field.hint or "Remove it.")

    def put_layer(self, layer: Iterable[Found]) -> None:
        """Take a source of lower precedence than all before it: places that are set already keep their value, and a note says so."""
        taken = dict(self._by_place)
        for found in layer:
            field = self._table.get(found.key)
            held = taken.get(field.to) if field and field.to else None
            if held is None:
                self.put(found.key, found.value, found.origin, spelled=found.spelled)
            else:
                self.note(found.spelled or found.key, f"{held.key or held.name} ({held.origin}) takes precedence", found.origin)

    def set(self, place: str, value: Any, origin: Origin, key: str = "") -> None:
        """Take an honoured value. Two keys may name one place only with one value."""
        held = self._by_place.get(place)
        if held and held.value != value:
            raise ConfigError(
                f"{origin}: {key}={value} contradicts {held.key}={held.value} ({held.origin}): both set {place.partition('.')[2]}.",
                cure="Keep one of the two.",
            )
        head, _, name = place.partition(".")
        self._by_place[place] = Setting(section=_SECTIONS.get(head, "server"), name=name, value=value, origin=origin, key=key)  # type: ignore[arg-type]

    def default(self, place: str, value: Any) -> None:
        """Set what the configuration left unset; its origin is the format's default."""
        if place not in self._by_place:
            self.set(place, value, Origin("default"))

    def default_from(self, place: str, setting: Setting) -> None:
        """Set what is unset from a setting of less weight, keeping where that was written."""
        if place not in self._by_place:
            self.set(place, setting.value, setting.origin, setting.key)

    def get(self, place: str, default: Any = None) -> Any:
        held = self._by_place.get(place)
        return default if held is None else held.value

    def drop(self, place: str) -> Setting | None:
        """Take a value back out, to be turned into others."""
        return self._by_place.pop(place, None)

    def places(self) -> list[str]:
        return list(self._by_place)

    def under(self, head: str) -> dict[str, Any]:
        """Name → value of all places head.NAME, to construct one struct from."""
        return {s.name: s.value for place, s in self._by_place.items() if place.partition(".")[0] == head}

    def where(self, place: str) -> Setting:
        return self._by_place[place]

    def note(self, key: str, text: str, origin: Origin, severity: str = "info") -> None:
        self.notes.append(Note(severity=severity, key=key, text=text, origin=origin))  # type: ignore[arg-type]

    def rows(self) -> tuple[Setting, ...]:
        return tuple(self._by_place.values())

    def build(self, kind: type, head: str, **more: Any) -> Any:
        """A struct of `kind` from all places under `head`; its own refusals are told with the file, line and key they come from."""
        values = self.under(head) | more
        try:
            return kind(**values)
        except ConfigError as error:
            culprit = next(
                (s for p, s in self._by_place.items() if p.startswith(head + ".") and error.message.startswith(f"{s.name}=")), None
            )
            if culprit is None:
                raise
            raise refusal(
                culprit.origin, culprit.key or culprit.name, culprit.value, "it is outside what Stoker takes", error.cure
            ) from None

    def _unknown(self, key: str, shown: str, origin: Origin) -> Field:
        near = nearest(key, list(self._table))
        cure = f"Did you mean {' or '.join(near)}?" if near else "Remove it."
        raise ConfigError(f"{origin}: unknown key {shown}.", cure=cure)


def refusal(origin: Origin, key: str, value: Any, limit: str, cure: str) -> ConfigError:
    """The one shape of a refused value: file, line, key, value, limit, cure. A nested value is named, not printed."""
    shown = f"<{type(value).__name__}>" if isinstance(value, (dict, list)) else str(value)
    return ConfigError(f"{origin}: {key}={shown[:80]} is refused: {limit}.", cure=cure)


def table(*rows: Field) -> dict[str, Field]:
    """Rows by key. Raises ValueError when two rows share one."""
    by_key = {row.key: row for row in rows}
    if len(by_key) != len(rows):
        raise ValueError("a key has two rows")
    return by_key
