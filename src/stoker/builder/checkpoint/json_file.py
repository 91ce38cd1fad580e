"""Reads the JSON files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError
from stoker.base.json_object import read_bounded_object

MAX_JSON_BYTES = 256 << 20
DOWNLOAD_AGAIN = "Download the checkpoint again."  # the cure of errors about damaged files


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming the file if it is too large or not a JSON object."""
    return read_bounded_object(file, MAX_JSON_BYTES, CheckpointError, DOWNLOAD_AGAIN)
