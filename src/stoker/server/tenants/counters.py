"""The counters of all named keys, in memory that the frontends of a server share, so that limits hold for all of them together.

Each key has a slot of eight numbers in a memory-mapped file. A process locks a slot for the few microseconds of a change (fcntl, which the
end of the process releases). If another process is suspended within its lock, the others go on without it after LOCK_S.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

MAX_SLOTS = 1 << 14
LOCK_S = 0.002
_SLOT = struct.Struct("<8d")


class Counters(msgspec.Struct):
    """The numbers of one slot. What was used within a minute decreases continuously, at the rate of the limit."""

    requests: float  # used
    requests_at: float  # monotonic time of `requests`, in seconds
    tokens: float
    tokens_at: float
    day_tokens: float  # used in the day `day`
    day: float  # days since 1970
    month_tokens: float
    month: float  # months since the year 0


class CounterTable:
    """The slots of a file, which is created if it does not exist. None: a file without a name, for this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        size = MAX_SLOTS * _SLOT.size
        if path is None:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)

    def close(self) -> None:
        """Close the file. Its content remains for other processes."""
        self._memory.close()
        os.close(self._file)

    def read(self, slot: int) -> Counters:
        """The present numbers of a slot."""
        return Counters(*_SLOT.unpack_from(self._memory, slot * _SLOT.size))

    @contextlib.contextmanager
    def change(self, slot: int) -> Iterator[Counters]:
        """The numbers of a slot, which are written back at the end of the block, also if it raises an error."""
        locked = self._lock(slot)
        try:
            counters = self.read(slot)
            yield counters
        finally:
            _SLOT.pack_into(self._memory, slot * _SLOT.size, *msgspec.structs.astuple(counters))
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _SLOT.size, slot * _SLOT.size)

    def _lock(self, slot: int) -> bool:
        """Lock a slot. False if another process does not release it within LOCK_S."""
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT.size, slot * _SLOT.size)
                return True
            except OSError:
                if time.monotonic() > deadline:
                    return False
