"""Identifies processes of this machine uniquely, and prepares a process that has loaded what it needs for its work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def start_time(pid: int | str) -> str | None:
    """The time at which a process started, in clock ticks since boot (proc(5)); None if there is no such process.

    A process id alone is ambiguous: a restarted container uses the same ids.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def freeze_objects() -> None:
    """Exempt all present objects from garbage collection.

    A process calls this when it has loaded everything. torch and Triton alone have 200,000 objects, over which a full collection takes
    about 100 ms, in the middle of a step. Afterwards a collection looks only at objects that were created since.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
