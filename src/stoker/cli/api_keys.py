"""Keys of a server: from the command line, a file, and the environment."""

from __future__ import annotations

from pathlib import Path

from stoker.base import env
from stoker.base.errors import ConfigError
from stoker.cli.options import read_lines


def collect_keys(keys: list[str]) -> tuple[str, ...]:
    """The keys that a server accepts besides those of a file: `keys` and STOKER_API_KEY."""
    in_environment = [key] if (key := env.api_key()) is not None else []
    return tuple(dict.fromkeys([*keys, *in_environment]))


def read_admin_key(file: Path | None) -> str | None:
    """The key in the only line of `file`, or STOKER_ADMIN_KEY. Raises ConfigError for a file without a key, or with several."""
    if file is None:
        return env.admin_key()
    lines = read_lines(file, "key")
    if len(lines) > 1:
        raise ConfigError(f"{file} has {len(lines)} lines.", cure="Name a file with one admin key.")
    return lines[0].strip()
