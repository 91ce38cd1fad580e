"""API keys of a server: from the command line, a file, and the environment."""

from __future__ import annotations

from pathlib import Path

from stoker.base import env
from stoker.cli.options import read_lines


def collect_keys(keys: list[str], file: Path | None) -> tuple[str, ...]:
    """The keys that a server accepts: `keys`, the lines of `file`, and STOKER_API_KEY. Raises ConfigError for a file without a key."""
    in_file = read_lines(file, "key") if file is not None else []
    in_environment = [key] if (key := env.api_key()) is not None else []
    return tuple(dict.fromkeys([*keys, *in_file, *in_environment]))
