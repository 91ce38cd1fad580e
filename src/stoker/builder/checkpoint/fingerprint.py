"""What a checkpoint is, by content: digests of its files, remembered while the files don't change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.base import env

PIECE_BYTES = 64 << 20
MOST_AT_ONCE = 8  # pieces: sha256 takes 1.4 GB/s a core, a page cache gives more


def fingerprint(files: Iterable[Path], progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """sha256 over the names and digests of `files`, in the order of their names. `progress` is told (bytes done, of how many)."""
    total, done = hashlib.sha256(), 0
    ordered = sorted(set(files), key=lambda file: (file.name, file))
    pool = ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1))
    try:
        digests = [Digest(file, pool) for file in ordered]
        num_bytes = sum(len(digest.pieces) for digest in digests) * PIECE_BYTES
        for digest in digests:
            for piece in digest.pieces:
                piece.result()
                done += PIECE_BYTES
                progress(done, num_bytes)
            total.update(f"{digest.file.name} {digest.read()}\n".encode())
    finally:
        pool.shutdown(cancel_futures=True)
    return total.hexdigest()


class Digest:
    """sha256 over the sha256 of a file's `pieces`, remembered in the cache directory under its path, size, inode and time of change.

    There are no pieces to wait for where it is known.
    """

    def __init__(self, file: Path, pool: ThreadPoolExecutor) -> None:
        status = file.stat()
        seen = f"{file.resolve()} {status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns} {PIECE_BYTES}"
        self.file = file
        self._note = env.cache_dir() / "digests" / hashlib.sha256(seen.encode()).hexdigest()
        known = self._note.read_text() if self._note.is_file() else ""
        self._known = known if len(known) == 64 else ""  # else the note is not whole
        self.pieces = [] if self._known else [pool.submit(_piece, file, start) for start in range(0, status.st_size, PIECE_BYTES)]

    def read(self) -> str:
        if not self._known:
            self._known = hashlib.sha256(b"".join(piece.result() for piece in self.pieces)).hexdigest()
            _remember(self._note, self._known)
        return self._known


def _piece(file: Path, start: int) -> bytes:
    """sha256 of PIECE_BYTES of a file, fewer at its end."""
    found, buffer, left = hashlib.sha256(), memoryview(bytearray(1 << 20)), PIECE_BYTES
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while left and (count := opened.readinto(buffer[:left])):
            found.update(buffer[:count])
            left -= count
    return found.digest()


def _remember(note: Path, found: str) -> None:
    """A cache directory that cannot be written costs time, not the build."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_name(f"{note.name}.{os.getpid()}")
        fresh.write_text(found)
        fresh.replace(note)
    except OSError:
        pass
