"""Uploaded files and results of batches: each is one file with its content and one with its object, in the state directory."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import NotFoundError, RequestError, StokerError
from stoker.server.errors import StorageError
from stoker.server.protocols.openai.responses.store import unix_time

MAX_FILES = 10_000
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class UnknownFileError(NotFoundError):
    """No file has this id."""

    code = "file_not_found"

    def __init__(self, file_id: str) -> None:
        super().__init__(f"there is no file {file_id[:80]!r}.", cure="It was deleted or has expired, or was never uploaded.")


class FilesFullError(StokerError):
    """The files exceed the limit."""

    status = 413
    code = "storage_full"

    def __init__(self, size: int, used: int, limit: int) -> None:
        super().__init__(
            f"a file of {size} bytes does not fit: {used} bytes are stored, and max_stored_bytes is {limit}.",
            cure=f"Delete files (there may be {MAX_FILES}), or raise --max-stored-bytes.",
        )


class FileStore:
    """Files by id. Those that have expired are deleted when files are listed or added."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes

    def add(self, content: bytes, filename: str, purpose: str, expires_after_s: int | None = None) -> dict[str, Any]:
        """Store an uploaded file. Raises FilesFullError, and StorageError if the disk is full."""
        stored = self.list()
        used = sum(each["bytes"] for each in stored)
        if used + len(content) > self._max_bytes or len(stored) >= MAX_FILES:
            raise FilesFullError(len(content), used, self._max_bytes)
        file = new_file_object(len(content), filename, purpose, expires_after_s)
        write_atomically(self._content_path(file["id"]), content)
        try:
            self._write(file)
        except StorageError:
            self._content_path(file["id"]).unlink()
            raise
        return file

    def move(self, source: Path, filename: str, expires_after_s: int | None = None) -> dict[str, Any]:
        """Store a result of a batch by moving `source`. Results are stored also beyond the limit."""
        file = new_file_object(source.stat().st_size, filename, "batch_output", expires_after_s)
        shutil.move(source, self._content_path(file["id"]))
        self._write(file)
        return file

    def get(self, file_id: str) -> dict[str, Any]:
        """The object of a file. Raises UnknownFileError."""
        if not _FILE_ID.fullmatch(file_id):
            raise UnknownFileError(file_id)
        try:
            file: dict[str, Any] = msgspec.json.decode(self._object_path(file_id).read_bytes())
        except FileNotFoundError:
            raise UnknownFileError(file_id) from None
        if file.get("expires_at") is not None and file["expires_at"] <= unix_time():
            self._remove(file_id)
            raise UnknownFileError(file_id)
        return file

    def content(self, file_id: str) -> bytes:
        """The bytes of a file. Raises UnknownFileError."""
        self.get(file_id)
        try:
            return self._content_path(file_id).read_bytes()
        except FileNotFoundError:
            raise UnknownFileError(file_id) from None

    def delete(self, file_id: str) -> None:
        """Delete a file. Raises UnknownFileError."""
        self.get(file_id)
        self._remove(file_id)

    def list(self) -> list[dict[str, Any]]:
        """The objects of all files, oldest first."""
        files = []
        for path in self._path.glob("*.json"):
            try:
                files.append(self.get(path.stem))
            except UnknownFileError:  # expired, or deleted by another process
                continue
        return sorted(files, key=lambda file: (file["created_at"], file["id"]))

    def _write(self, file: dict[str, Any]) -> None:
        """Store the object of a file."""
        write_atomically(self._object_path(file["id"]), msgspec.json.encode(file))

    def _remove(self, file_id: str) -> None:
        """Delete the object and the content of a file."""
        self._object_path(file_id).unlink(missing_ok=True)
        self._content_path(file_id).unlink(missing_ok=True)

    def _object_path(self, file_id: str) -> Path:
        """Where the object of a file is stored, as JSON."""
        return self._path / f"{file_id}.json"

    def _content_path(self, file_id: str) -> Path:
        """Where the content of a file is stored."""
        return self._path / f"{file_id}.content"


def new_file_object(size: int, filename: str, purpose: str, expires_after_s: int | None) -> dict[str, Any]:
    """OpenAI's object for a new file, with a new id."""
    created = unix_time()
    return {
        "id": f"file-{uuid.uuid4().hex}",
        "object": "file",
        "bytes": size,
        "created_at": created,
        "expires_at": created + expires_after_s if expires_after_s is not None else None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }


def read_expiry(anchor: Any, seconds: Any, field: str) -> int:
    """The seconds of the field expires_after. `anchor` must be created_at. Raises RequestError."""
    if anchor != "created_at":
        raise RequestError(f"{field}.anchor", anchor, "it must be created_at")
    number = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 9 else seconds
    if type(number) is not int or not 3600 <= number <= 2_592_000:
        raise RequestError(f"{field}.seconds", seconds, "it must be a whole number from 3600 to 2592000")
    return number


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other processes read either the old or the new content. Raises StorageError, and then leaves nothing."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(path, error.strerror) from None
