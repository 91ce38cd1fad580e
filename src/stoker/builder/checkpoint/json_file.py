"""Reads the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
DOWNLOAD_AGAIN = "Download the checkpoint again."  # the cure of errors about damaged files


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming the file if it is too large or not a JSON object."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file} has more than {MAX_JSON_BYTES} bytes.", cure=DOWNLOAD_AGAIN)
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{file} is not JSON ({problem}).", cure=DOWNLOAD_AGAIN) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not an object.", cure=DOWNLOAD_AGAIN)
    return data
