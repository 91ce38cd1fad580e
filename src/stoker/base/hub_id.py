"""Recognizes paths inside the cache of the Hugging Face hub, whose folders are named after commits."""

from __future__ import annotations

import os
from pathlib import Path

_PREFIX = "models--"


def hub_id_of_snapshot(path: Path) -> str | None:
    """ORG/NAME of the model whose hub snapshot contains `path` (.../models--ORG--NAME/snapshots/COMMIT), or None for other paths."""
    parts = Path(os.path.abspath(path)).parts
    for index, part in enumerate(parts[:-2]):
        if part.startswith(_PREFIX) and parts[index + 1] == "snapshots":
            return part.removeprefix(_PREFIX).replace("--", "/")
    return None
