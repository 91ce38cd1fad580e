"""Identifies processes of this machine uniquely."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int | str) -> str | None:
    """The time at which a process started, in clock ticks since boot (proc(5)); None if there is no such process.

    A process id alone is ambiguous: a restarted container uses the same ids.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
