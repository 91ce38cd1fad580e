"""The folder of fetched sources: each entry is made once, under a lock, and appears whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from filelock import FileLock

from stoker.base.errors import CheckpointError

MAX_BYTES = 4 << 40
MAX_FILES = 100_000

Progress = Callable[[str, int, int | None], None]  # what, bytes done, bytes in all when known


class Store:
    """Fetched directories by key."""

    def __init__(self, root: Path, max_bytes: int, progress: Progress) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.progress = progress

    def keep(self, kind: str, identity: str, make: Callable[[Path], None]) -> Path:
        """The directory for `identity`. When absent, `make` fills an empty one, which is then renamed; a failure leaves nothing.

        Another process that wants the same entry waits for the lock and finds it made.
        """
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        folder = self.root / kind
        folder.mkdir(parents=True, exist_ok=True)
        entry = folder / name
        with FileLock(str(folder / f"{name}.lock")):
            if not entry.is_dir():
                for stale in folder.glob(f"{name}.partial-*"):  # of a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=folder))
                try:
                    make(partial)
                    partial.chmod(0o755)
                    partial.rename(entry)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        return entry

    def check_size(self, what: str, num_bytes: int, num_files: int = 1) -> None:
        """Raise CheckpointError when `what` is larger than allowed, or than what is free on the disk."""
        if num_files > MAX_FILES or num_bytes > self.max_bytes:
            raise CheckpointError(
                f"{what} has {num_files} files and {num_bytes} bytes; at most {MAX_FILES} files and {self.max_bytes} bytes are taken.",
                cure="Name what holds the model alone.",
            )
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if num_bytes > free:
            raise CheckpointError(
                f"{what} needs {num_bytes} bytes, and {self.root} has {free} free.", cure="Set STOKER_CACHE to a larger disk."
            )


class Counter:
    """Adds up bytes from several threads and reports them."""

    def __init__(self, what: str, total: int | None, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = 0
        self._lock = Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress(self._what, self._done, self._total)


def inside(name: str) -> bool:
    """Whether a relative name stays inside its folder: no .., no root, no drive, no NUL."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and not name.startswith(("/", "\\")) and ".." not in parts and "\0" not in name and ":" not in parts[0]


def unwrapped(folder: Path) -> Path:
    """`folder`, or the one directory that is all it holds, as `tar c model/` makes it."""
    children = list(folder.iterdir())
    return children[0] if len(children) == 1 and children[0].is_dir() else folder
