"""Progress bars of long work, on stderr."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars:
    """One bar a stage; called with (stage, done, total). They vanish when the block ends, and are shown to terminals only."""

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

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


class Lines:
    """The same for logs: a line when a stage begins and at each tenth of it. Called from any thread."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._told: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        with self._lock:
            if tenth <= self._told.get(stage, -1):
                return
            self._told[stage] = tenth
        self._tell(f"{stage}: {10 * tenth} %" if total else f"{stage}: begun")
