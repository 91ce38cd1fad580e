"""Identifies processes of this machine."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int | str) -> str | None:
    """When a process started, in clock ticks since boot (proc(5)); None when there is no such process.

    A process id alone is ambiguous: a restarted container uses the same ones.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
