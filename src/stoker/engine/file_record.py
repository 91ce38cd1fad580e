"""The size and digest of a file, as config.json of an engine lists them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

_BLOCK = 1 << 20


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it was written."""

    size: int  # bytes
    sha256: str


def record_file(file: Path) -> FileRecord:
    """Flush a small file to the disk, and read its size and digest."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return FileRecord(file.stat().st_size, file_sha256(file))


def file_sha256(file: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """The SHA-256 of a file's content, in hexadecimal. `progress` receives the number of bytes of each block that was read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()
