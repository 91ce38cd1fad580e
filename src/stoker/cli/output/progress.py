"""Progress of long operations: bars for a terminal, lines for a log. Both are called with (stage, done, total or None)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressBars:
    """One progress bar per stage, shown while the `with` block runs and only when `console` is a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


class ProgressLog:
    """One line when a stage begins, and one for each tenth of it. May be called from any thread."""

    def __init__(self, write_line: Callable[[str], object]) -> None:
        self._write_line = write_line
        self._reported: dict[str, int] = {}  # stage: tenths
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        tenths = 10 * done // total if total else 0
        with self._lock:
            if tenths <= self._reported.get(stage, -1):
                return
            self._reported[stage] = tenths
        self._write_line(f"{stage}: {10 * tenths} %" if total else f"{stage}: started")
