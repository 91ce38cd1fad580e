"""Identifies processes of this machine uniquely, and prepares a process that has loaded what it needs for its work."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEW_OBJECTS = 10_000  # after which garbage is collected, instead of Python's 700


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
    about 100 ms, in the middle of a step. Afterwards a collection looks only at objects that were created since, and there are fewer
    collections. With the thresholds of Python, 900 steps of 768 rows have 25 full ones of 22 to 44 ms, most of it for lists of token ids.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def collect_rarely() -> None:
    """Collect garbage once per NEW_OBJECTS new objects, and never when the process ends.

    For commands, which import torch where they need it: `importing` explains what collections take. With 10,000 it is 0.1 s.
    """
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)


@contextmanager
def importing() -> Iterator[None]:
    """Import large modules in the block without garbage collection, and exempt all present objects from later ones.

    torch creates 270,000 objects that stay. Traversing them while they are created, and once more when the process ends, takes 0.7 of
    2.3 s of CPU time.
    """
    with without_garbage_collection():
        yield
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
