"""Batches in the state directory: a folder for each, with its object and the results so far."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import NotFoundError
from stoker.server.protocols.openai.batches.files import write_atomically
from stoker.server.protocols.openai.responses.store import unix_time

MAX_BATCHES = 1000
WINDOW_S = 86_400  # completion_window
ENDED = ("completed", "failed", "expired", "cancelled")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class UnknownBatchError(NotFoundError):
    """No batch has this id."""

    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {batch_id[:80]!r}.")


class BatchFolder:
    """The folder of one batch. The process that runs it holds its lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.output = path / "output.jsonl"
        self.errors = path / "errors.jsonl"
        self._lock: int | None = None

    def read(self) -> dict[str, Any]:
        """The object of the batch. Raises UnknownBatchError."""
        try:
            batch: dict[str, Any] = msgspec.json.decode((self._path / "batch.json").read_bytes())
        except FileNotFoundError:
            raise UnknownBatchError(self._path.name) from None
        if self.is_cancelled and batch["status"] not in ENDED:
            batch |= {"status": "cancelling", "cancelling_at": int((self._path / "cancel").stat().st_mtime)}
        return batch

    def write(self, batch: dict[str, Any]) -> None:
        """Replace the object of the batch."""
        write_atomically(self._path / "batch.json", msgspec.json.encode(batch))

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` has been called, in any process."""
        return (self._path / "cancel").exists()

    def cancel(self) -> None:
        """Make the process that runs the batch end it."""
        (self._path / "cancel").touch()

    def acquire(self) -> bool:
        """Lock the batch for this process. Returns False if another process runs it."""
        self._lock = os.open(self._path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> None:
        """Release the lock, so that another process can run the batch."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class BatchRecords:
    """Batches by id. Beyond MAX_BATCHES, the oldest ones that have ended are forgotten."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self._path = path

    def create(self, **members: Any) -> dict[str, Any]:
        """Write a new batch object with status validating."""
        created = unix_time()
        batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "errors": None,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": created,
            "expires_at": created + WINDOW_S,
            **dict.fromkeys(
                ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
            ),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "usage": None,
            **members,
        }
        self._forget_old()
        (self._path / batch["id"]).mkdir(mode=0o700)
        self.folder(batch["id"]).write(batch)
        return batch

    def folder(self, batch_id: str) -> BatchFolder:
        """The folder of a batch. Raises UnknownBatchError."""
        if not _BATCH_ID.fullmatch(batch_id) or not (self._path / batch_id).is_dir():
            raise UnknownBatchError(batch_id)
        return BatchFolder(self._path / batch_id)

    def list(self) -> list[dict[str, Any]]:
        """All batches, oldest first."""
        batches = []
        for path in self._path.iterdir():
            try:
                batches.append(BatchFolder(path).read())
            except UnknownBatchError:  # it is being created or removed
                continue
        return sorted(batches, key=lambda batch: (batch["created_at"], batch["id"]))

    def _forget_old(self) -> None:
        """Delete the oldest batches that have ended, until there is room for a new one."""
        batches = self.list()
        ended = [batch for batch in batches if batch["status"] in ENDED]
        for batch in ended[: max(0, len(batches) - MAX_BATCHES + 1)]:
            shutil.rmtree(self._path / batch["id"], ignore_errors=True)
