"""The size and digest of a file, as config.json of an engine lists them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it was written."""

    size: int  # bytes
    sha256: str


def record_file(file: Path) -> FileRecord:
    """Flush a small file to the disk, and read its size and digest."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return FileRecord(file.stat().st_size, file_sha256(file))


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
