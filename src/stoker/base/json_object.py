"""Reads JSON files that come from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.base.errors import StokerError


def read_bounded_object(file: Path, max_bytes: int, error: type[StokerError], cure: str) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes` bytes. Raises `error`, which names the file, with the text `cure`."""
    if file.stat().st_size > max_bytes:
        raise error(f"{file} has more than {max_bytes} bytes.", cure=cure)
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise error(f"{file} is not JSON ({problem}).", cure=cure) from None
    if not isinstance(data, dict):
        raise error(f"{file} is not an object.", cure=cure)
    return data
