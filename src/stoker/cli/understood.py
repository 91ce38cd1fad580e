"""`stoker serve --dry-run`: what a folder asks for, and where each setting was written."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.deploy.deployment import BuildOptions, Deployment
from stoker.server.schemas.settings import ServerSettings

COMMAND_LINE = "command line"
_HIDDEN = ("api_keys", "options")  # options' own fields are rows; keys are nobody's business
Row = tuple[str, str, str]


def understood(deployment: Deployment, given: frozenset[str]) -> list[str]:
    """The lines to print: the source, then a table a section, then the notes. Secrets are named, never shown."""
    lines = [f"{deployment.path} is of the format {deployment.format}.", "", "source", *_table(_source(deployment))]
    for section, held in (("build", None), ("runtime", deployment.runtime), ("server", deployment.server)):
        found = _rows(deployment, section, held, given)
        lines += ["", section, *_table(found)] if found else []
    if deployment.notes:
        lines += ["", "notes", *(f"  {note.severity}: {note}" for note in deployment.notes)]
    return lines


def _source(deployment: Deployment) -> list[Row]:
    source = deployment.source
    building = isinstance(source, BuildOptions)
    rows = [("checkpoint" if building else "engine", source.checkpoint if isinstance(source, BuildOptions) else source.location, "")]
    rows += [("revision", source.revision, "")] if source.revision else []
    rows += [("opened by the secret", source.token_secret, "its name; the value is never shown")] if source.token_secret else []
    rows += [("tokenizer", deployment.tokenizer, "")] if deployment.tokenizer else []
    return [*rows, ("then", "built, or taken from the cache" if building else "served as it is", "")]


def _rows(deployment: Deployment, section: str, held: ServerSettings | RuntimeConfig | None, given: frozenset[str]) -> list[Row]:
    """The format's rows; then what the command line set, in place of the format's own."""
    own = [] if held is None else [name for name in held.__struct_fields__ if name in given and name not in _HIDDEN]
    rows = [(s, s.name) for s in deployment.settings if s.section == section]
    kept = [
        (f"{s.name} ({s.key})" if s.key and s.key != s.name else s.name, _shown(s.value), str(s.origin))
        for s, name in rows
        if name not in own
    ]
    return [*kept, *((name, _shown(getattr(held, name)), COMMAND_LINE) for name in own), *_address(held, own, [n for _, n in rows])]


def _address(held: ServerSettings | RuntimeConfig | None, own: list[str], rows: list[str]) -> list[Row]:
    """Its name, and where it will listen, whoever said so."""
    if not isinstance(held, ServerSettings):
        return []
    names = [name for name in ("model_name", "host", "http_port", "protocols") if name not in own and name not in rows]
    return [(name, _shown(getattr(held, name)), "default") for name in names if getattr(held, name) not in (None, ())]


def _shown(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return ", ".join(f"{name}={getattr(value, name)}" for name in value.__struct_fields__)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _table(rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return [f"  {name:<{wide[0]}}  {value:<{wide[1]}}  {origin}".rstrip() for name, value, origin in rows]
