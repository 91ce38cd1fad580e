"""The files of Triton's traces, which are JSON arrays. Several frontends append to the same file under a lock."""

from __future__ import annotations

import fcntl
import itertools
from pathlib import Path
from typing import Any

import msgspec


def append(path: Path, entries: list[dict[str, Any]]) -> None:
    """Append entries to the array in a file, which is created if it does not exist, and is a whole array before and afterwards."""
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = b",\n".join(map(msgspec.json.encode, entries))
        size = file.seek(0, 2)
        if size > 2:  # more than []
            file.truncate(size - 2)  # without the last "]\n"
            file.write(b",\n" + text + b"]\n")
        else:
            file.truncate(0)
            file.write(b"[" + text + b"]\n")


def write_next(path: Path, entries: list[dict[str, Any]]) -> None:
    """Write entries to the first of the files PATH.0, PATH.1 and so on that does not exist."""
    for index in itertools.count():
        try:
            with path.with_name(f"{path.name}.{index}").open("xb") as file:
                file.write(b"[" + b",\n".join(map(msgspec.json.encode, entries)) + b"]\n")
                return
        except FileExistsError:
            continue
