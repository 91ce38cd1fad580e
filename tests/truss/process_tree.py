"""Processes and their descendants, as /proc lists them."""

from __future__ import annotations

from pathlib import Path


def processes_below(pid: int) -> set[int]:
    """The ids of a process and of all its descendants."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found.update(*(processes_below(int(child)) for child in task.read_text().split()))
    return found


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
