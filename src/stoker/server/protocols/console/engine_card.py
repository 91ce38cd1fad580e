"""The engine card: what the config.json of the served engine says about it, and its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import UnavailableError

WEIGHTS = ".safetensors"
SHOWN = ("stoker_version", "model", "recipe", "limits", "dtype", "mapping", "target", "weights", "checkpoint", "checks")


def engine_card(folder: str) -> dict[str, Any]:
    """The card of the engine in `folder`. Raises UnavailableError if its config.json cannot be read."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        sizes = {name: int(record["size"]) for name, record in config.get("files", {}).items()}
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise UnavailableError(f"{path} cannot be read: {error}.", cure="Build the engine again.") from None
    card = {name: config.get(name) for name in SHOWN}
    card["num_bytes"] = sum(sizes.values())
    card["weight_bytes"] = sum(size for name, size in sizes.items() if name.endswith(WEIGHTS))
    return card
