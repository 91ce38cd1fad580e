"""The directory in which a server keeps what outlives a request: stored responses, uploaded files, batches.

All frontend processes of a server use the same directory. Each of them holds a lock on a file there while it runs, so that another
process, or a later server, can find out whether the owner of unfinished work still exists.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
from pathlib import Path

from stoker.base.errors import ConfigError


class StateDirectory:
    """An open state directory. `owner` identifies this process in records about unfinished work."""

    def __init__(self, path: str | None) -> None:
        """Open or create the directory. Without a path, it is a temporary one that exists as long as this object.

        Raises ConfigError if it cannot be written.
        """
        self._temporary = None
        if path is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="stoker-state-")
            path = self._temporary.name
        self.path = Path(path)
        self.owner = uuid.uuid4().hex
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.path / "owners").mkdir(exist_ok=True)
            self._lock = self._create_lock()
            self._remove_old_locks()
        except OSError as error:
            raise ConfigError(
                f"state_dir={str(self.path)!r} cannot be used: {error.strerror}.", cure="Name a directory that the server can write."
            ) from None

    def is_running(self, owner: str) -> bool:
        """Whether the process that wrote `owner` still runs. The file of one that was killed is removed."""
        if owner == self.owner:
            return True
        try:
            descriptor = os.open(self._lock_path(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        self._lock_path(owner).unlink(missing_ok=True)
        return False

    def close(self) -> None:
        """Release the lock, and delete the directory if it is temporary."""
        os.close(self._lock)
        self._lock_path(self.owner).unlink(missing_ok=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _create_lock(self) -> int:
        """Create the file of this process. It appears under its name when it is locked."""
        path = self._lock_path(self.owner)
        created = path.with_suffix(".new")
        lock = os.open(created, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        created.rename(path)
        return lock

    def _remove_old_locks(self) -> None:
        """Remove the files of processes that were killed."""
        for path in (self.path / "owners").glob("*.lock"):
            self.is_running(path.stem)

    def _lock_path(self, owner: str) -> Path:
        """The file that `owner` locks while it runs."""
        return self.path / "owners" / f"{owner}.lock"
