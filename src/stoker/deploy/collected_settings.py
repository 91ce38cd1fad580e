"""Collects the values of a deployment configuration, checked against the field table of its format.

A format declares its keys as rows of a `FieldTable` (stoker.base.fields), adds every value that it finds to `CollectedSettings`, and
creates its Deployment from the result. Nothing is silently ignored: a key without a row is an error that suggests the nearest names.

The `target` of a row is SECTION.NAME: build.NAME, limits.NAME, mapping.NAME, quantization.NAME (a setting of the quantization format),
extra.NAME, engine.NAME, runtime.NAME, server.NAME or options.NAME (of the protocol). Targets without a section are values that the
format itself converts to others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.draft_settings import unused_draft_settings
from stoker.base.errors import ConfigError
from stoker.base.fields.errors import InvalidValueError
from stoker.base.fields.table import FieldRow, FieldTable
from stoker.deploy.deployment import DEFAULT, Note, Origin, Section, Setting, Severity

S = TypeVar("S", bound=msgspec.Struct)

# Section of a target → section of the report.
_REPORT_SECTIONS: dict[str, Section] = {
    "build": "build",
    "limits": "build",
    "mapping": "build",
    "quantization": "build",
    "extra": "build",
    "engine": "build",
    "runtime": "runtime",
}


class FoundValue(msgspec.Struct, frozen=True):
    """A key and its value in a file or the environment. `spelling` is the name as it was written, if it is not `key`."""

    key: str
    value: Any
    origin: Origin
    spelling: str = ""


class CollectedSettings:
    """The settings and notes of one configuration. With `typed`, values have types (YAML); otherwise they are text."""

    def __init__(self, table: FieldTable[FieldRow], *, typed: bool = False) -> None:
        self._table = table
        self._typed = typed
        self._by_target: dict[str, Setting] = {}
        self.notes: list[Note] = []

    def add(self, found: FoundValue) -> None:
        """Check one value and store or note it.

        Raises ConfigError for an unknown key, a wrong value, a rejected key, and a target that has another value already.
        """
        shown = found.spelling or found.key
        row = self._table.get(found.key)
        if row is None:
            raise ConfigError(f"{found.origin}: unknown key {shown}.", cure=self._table.suggestion(found.key, "Remove it."))
        try:
            value = row.check(found.value) if self._typed else row.parse(found.value)
        except InvalidValueError as error:
            raise error.config_error(shown, origin=found.origin) from None
        if row.status == "no effect":
            self.note(shown, row.reason, found.origin)
        elif row.status == "accepted" and value is None:
            self.note(shown, "Stoker chooses the value", found.origin)
        elif row.status == "accepted":
            self.set(row.target, value, found.origin, shown)

    def add_layer(self, layer: Iterable[FoundValue]) -> None:
        """Add a source whose precedence is lower than that of all sources before it. A set target keeps its value, and a note is added."""
        before = dict(self._by_target)
        for found in layer:
            row = self._table.get(found.key)
            setting = before.get(row.target) if row and row.target else None
            if setting is None:
                self.add(found)
            else:
                text = f"{setting.key or setting.name} ({setting.origin}) takes precedence"
                self.note(found.spelling or found.key, text, found.origin)

    def set(self, target: str, value: Any, origin: Origin, key: str = "") -> None:
        """Store a value. Raises ConfigError when another key has set another value for the same target."""
        section, _, name = target.rpartition(".")
        present = self._by_target.get(target)
        if present and present.value != value:
            raise ConfigError(
                f"{origin}: {key}={value} contradicts {present.key}={present.value} ({present.origin}): both set {name}.",
                cure="Keep one of the two.",
            )
        report_section = _REPORT_SECTIONS.get(section, "server")
        self._by_target[target] = Setting(section=report_section, name=name, value=value, origin=origin, key=key)

    def set_default(self, target: str, value: Any) -> None:
        """Set a target that the configuration did not set. Its origin is the default of the format."""
        if target not in self._by_target:
            self.set(target, value, DEFAULT)

    def get(self, target: str, default: Any = None) -> Any:
        """The value of a target, or `default` if it is not set."""
        setting = self._by_target.get(target)
        return default if setting is None else setting.value

    def setting(self, target: str) -> Setting:
        """The setting of a target. Raises KeyError if it is not set."""
        return self._by_target[target]

    def pop(self, target: str) -> Setting | None:
        """Remove and return a setting, for a caller that converts it to others. None if it is not set."""
        return self._by_target.pop(target, None)

    def targets(self) -> list[str]:
        """All targets that are set."""
        return list(self._by_target)

    def section(self, section: str) -> dict[str, Any]:
        """The values of all targets SECTION.NAME, by name."""
        prefix = f"{section}."
        return {setting.name: setting.value for target, setting in self._by_target.items() if target.startswith(prefix)}

    def settings(self) -> tuple[Setting, ...]:
        """All settings, in the order in which they were read."""
        return tuple(self._by_target.values())

    def note(self, key: str, text: str, origin: Origin, severity: Severity = "info") -> None:
        """Add a remark about a key."""
        self.notes.append(Note(severity=severity, key=key, text=text, origin=origin))

    def note_unused_drafts(self, runtime: RuntimeConfig, key: str) -> None:
        """Add a note for each setting of drafts that has no effect, because neither `key` nor an option selects how to draft."""
        for name in unused_draft_settings(runtime):
            if setting := self._by_target.get(f"runtime.{name}"):
                self.note(setting.key, f"it has no effect without {key} or --speculate", setting.origin)

    def build(self, kind: type[S], section: str, **more: Any) -> S:
        """A struct of type `kind` with the values of a section and `more`.

        A ConfigError of its constructor is raised with the file, line and key of the value.
        """
        try:
            return kind(**self.section(section), **more)
        except ConfigError as error:
            setting = self._culprit(section, error)
            if setting is None:
                raise
            limit = "it is outside the supported range"
            raise invalid_value(setting.origin, setting.key or setting.name, setting.value, limit, error.cure) from None

    def _culprit(self, section: str, error: ConfigError) -> Setting | None:
        """The setting that caused an error of the form NAME=VALUE, or None."""
        targets = [target for target in self._by_target if target.startswith(f"{section}.")]
        return next((self._by_target[t] for t in targets if error.message.startswith(f"{self._by_target[t].name}=")), None)


def invalid_value(origin: Origin, key: str, value: Any, limit: str, cure: str) -> ConfigError:
    """The error for a value that is refused because of other settings. `limit` completes the sentence "KEY=VALUE is refused: ..."."""
    return InvalidValueError(value, limit, cure=cure).config_error(key, origin=origin)
