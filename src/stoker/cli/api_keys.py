"""API keys of a server: from the command line and the environment."""

from __future__ import annotations

from stoker.base import env


def collect_keys(keys: list[str]) -> tuple[str, ...]:
    """The keys that a server accepts besides those of a file: `keys` and STOKER_API_KEY."""
    in_environment = [key] if (key := env.api_key()) is not None else []
    return tuple(dict.fromkeys([*keys, *in_environment]))
