"""The report of `stoker serve --dry-run`: every setting of a deployment, with the file and line it was read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.deploy.deployment import BuildOptions, Deployment
from stoker.server.settings import ServerSettings

# API keys are secret; the fields of `options` are listed one by one.
_NOT_LISTED = ("api_keys", "admin_key", "options")
_ALWAYS_LISTED = ("model_name", "host", "http_port", "protocols")
Row = tuple[str, str, str]  # name, value, origin


def deployment_report(deployment: Deployment, origins: Mapping[str, str]) -> list[str]:
    """The lines of the report: the source, a table per section, and the notes. Secrets are represented by their names.

    `origins` are the origins of fields that were set on the command line or in a file of options.
    """
    lines = [f"{deployment.path} is of the format {deployment.format}.", "", "source", *_format_rows(_source_rows(deployment))]
    for section, config in (("build", None), ("runtime", deployment.runtime), ("server", deployment.server)):
        rows = _section_rows(deployment, section, config, origins)
        lines += ["", section, *_format_rows(rows)] if rows else []
    if deployment.notes:
        lines += ["", "notes", *(f"  {note.severity}: {note}" for note in deployment.notes)]
    return lines


def _source_rows(deployment: Deployment) -> list[Row]:
    """The rows about the checkpoint or engine."""
    source = deployment.source
    if isinstance(source, BuildOptions):
        rows, action = [("checkpoint", source.checkpoint, "")], "built, or taken from the cache"
    else:
        rows, action = [("engine", source.location, "")], "served as it is"
    rows += [("revision", source.revision, "")] if source.revision else []
    rows += [("access token", source.token_secret, "the secret's name; its value is never shown")] if source.token_secret else []
    rows += [("tokenizer", deployment.tokenizer, "")] if deployment.tokenizer else []
    return [*rows, ("then", action, "")]


def _section_rows(
    deployment: Deployment, section: str, config: ServerSettings | RuntimeConfig | None, origins: Mapping[str, str]
) -> list[Row]:
    """The rows of one section: settings of the deployment, then those of the command line that replace them, then defaults."""
    overridden = [] if config is None else [n for n in config.__struct_fields__ if n in origins and n not in _NOT_LISTED]
    settings = [setting for setting in deployment.settings if setting.section == section]
    rows = [
        (f"{s.name} ({s.key})" if s.key and s.key != s.name else s.name, _format_value(s.value), str(s.origin))
        for s in settings
        if s.name not in overridden
    ]
    rows += [(name, _format_value(getattr(config, name)), origins[name]) for name in overridden]
    return rows + _default_rows(config, {*overridden, *(s.name for s in settings)})


def _default_rows(config: ServerSettings | RuntimeConfig | None, listed: set[str]) -> list[Row]:
    """The rows for the default model name, address and protocols, if no other row has them."""
    if not isinstance(config, ServerSettings):
        return []
    names = [name for name in _ALWAYS_LISTED if name not in listed and getattr(config, name) not in (None, ())]
    return [(name, _format_value(getattr(config, name)), "default") for name in names]


def _format_value(value: object) -> str:
    """A setting as text: fields of a struct as name=value, items of a tuple separated by commas, everything else by str()."""
    if isinstance(value, msgspec.Struct):
        return ", ".join(f"{name}={getattr(value, name)}" for name in value.__struct_fields__)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _format_rows(rows: Iterable[Row]) -> list[str]:
    """The rows as lines with aligned columns."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return [f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip() for name, value, origin in rows]
