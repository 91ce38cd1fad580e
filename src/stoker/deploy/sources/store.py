"""The directory of fetched sources. Each entry is created once, under a lock, and appears only when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from filelock import FileLock

from stoker.base.disk import names_path
from stoker.base.errors import CheckpointError

MAX_BYTES = 4 << 40
MAX_FILES = 100_000

Progress = Callable[[str, int, int | None], None]  # name, bytes done, bytes in total if known


class Store:
    """Directories of fetched sources, by key."""

    def __init__(self, root: Path, max_bytes: int, progress: Progress) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.progress = progress

    def get(self, kind: str, identity: str, fill: Callable[[Path], None]) -> Path:
        """The directory for `identity`. If it does not exist, `fill` fills an empty directory, which is then renamed.

        A failure leaves nothing. Another process that needs the same entry waits for the lock.
        """
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        folder = self.root / kind
        folder.mkdir(parents=True, exist_ok=True)
        entry = folder / name
        with FileLock(str(folder / f"{name}.lock")):
            if not entry.is_dir():
                for stale in folder.glob(f"{name}.partial-*"):  # left by a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=folder))
                try:
                    with names_path(folder):
                        fill(partial)
                    partial.chmod(0o755)
                    partial.rename(entry)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.utime(entry)  # the time of the last use
        return entry

    def check_size(self, name: str, num_bytes: int, num_files: int = 1) -> None:
        """Raise CheckpointError when `name` exceeds the limits or the free space of the disk."""
        if num_files > MAX_FILES or num_bytes > self.max_bytes:
            raise CheckpointError(
                f"{name} has {num_files} files and {num_bytes} bytes; the limit is {MAX_FILES} files and {self.max_bytes} bytes.",
                cure="Name a location that contains only the model.",
            )
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if num_bytes > free:
            raise CheckpointError(
                f"{name} needs {num_bytes} bytes, and {self.root} has {free} free.", cure="Set STOKER_CACHE to a folder on a larger disk."
            )


class Counter:
    """Sums bytes that several threads have processed, and reports the sum."""

    def __init__(self, name: str, total: int | None, progress: Progress) -> None:
        self._name, self._total, self._progress = name, total, progress
        self._done = 0
        self._lock = Lock()

    def add(self, num_bytes: int) -> None:
        """Add a number of bytes, and report the sum."""
        with self._lock:
            self._done += num_bytes
            self._progress(self._name, self._done, self._total)


def is_inside(name: str) -> bool:
    """Whether a relative path stays in its folder: without .., root, drive and NUL."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and not name.startswith(("/", "\\")) and ".." not in parts and "\0" not in name and ":" not in parts[0]


def without_single_parent(folder: Path) -> Path:
    """`folder`, or the only directory in it, as in archives that `tar c model/` creates."""
    children = list(folder.iterdir())
    return children[0] if len(children) == 1 and children[0].is_dir() else folder
