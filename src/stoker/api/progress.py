"""Progress of long operations: bars for a terminal, lines for a log. Both are called with (stage, done, total or None)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class ProgressBars:
    """One progress bar per stage, shown while the `with` block runs and only when `console` is a terminal.

    With `status`, a first line shows it with the elapsed time, also while no stage makes progress.
    """

    def __init__(self, console: Console, status: str | None = None) -> None:
        columns = (
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:>10}"),
            BarColumn(),
            _Percentage(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._status = None if status is None else self._progress.add_task(status, total=None)

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        with self._lock:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def set_status(self, status: str) -> None:
        """Replace the text of the first line, and remove the bars of the stages so far."""
        if self._status is not None:
            self._progress.update(self._status, description=status)
        with self._lock:
            for task in self._tasks.values():
                self._progress.remove_task(task)
            self._tasks.clear()


class _Percentage(ProgressColumn):
    """The percentage of a task whose total is known."""

    def render(self, task: Task) -> Text:
        return Text("     " if task.total is None else f"{task.percentage:>3.0f} %")


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

    def set_status(self, status: str) -> None:
        """A log has lines of stages only."""


class Waiting:
    """A line with the elapsed time on a terminal, for the time in which other processes may write to it.

    The cursor stays at the start of the line, so that a log line of another process replaces the text.
    """

    INTERVAL_S = 0.25

    def __init__(self, status: str) -> None:
        self._status = status
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-waiting", daemon=True)
        self._started = time.monotonic()
        if sys.stderr.isatty():
            self._thread.start()

    def stop(self) -> None:
        """Remove the line. Further calls have no effect."""
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """The thread: write the line every INTERVAL_S until `stop`."""
        while not self._has_ended.wait(self.INTERVAL_S):
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            sys.stderr.write(f"\r{self._status} {minutes}:{seconds:02}\r")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def write_progress_line(line: str) -> None:
    """Print a line of progress on stderr."""
    print(f"stoker: {line}", file=sys.stderr, flush=True)


@contextmanager
def shown_progress(status: str, write_line: Callable[[str], object] = write_progress_line) -> Iterator[ProgressBars | ProgressLog]:
    """Bars below the line `status` when stderr is a terminal; otherwise `write_line` receives a line for each tenth of a stage."""
    # The stream itself: transformers draws its own bars while a reference model is loaded, and sys.stderr is redirected then.
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield ProgressLog(write_line)
        return
    with ProgressBars(console, status) as bars:
        yield bars
