"""A checkpoint's JSON files, which are objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
FETCH = "Download the checkpoint again."


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file} has more than {MAX_JSON_BYTES} bytes.", cure=FETCH)
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{file} is not JSON ({problem}).", cure=FETCH) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not an object.", cure=FETCH)
    return data
