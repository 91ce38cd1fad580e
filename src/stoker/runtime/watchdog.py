"""Logs a hung step once, with the scheduler state and the stacks of all threads."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.base.logging import get_logger

log = get_logger(__name__)


class Watchdog:
    """A thread that logs steps which do not end.

    It does not affect readiness: clients detect that the loop does not answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.num_hangs = 0
        self._step: tuple[float, Callable[[], str]] | None = None  # start time, description
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._watch, name="stoker-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def step(self, describe: Callable[[], str]) -> Iterator[None]:
        """Observe the operation inside the block. `describe` is called from another thread if it hangs."""
        self._step = (time.monotonic(), describe)
        try:
            yield
        finally:
            self._step = None

    def _watch(self) -> None:
        """The loop of the thread: log each operation that takes longer than `timeout_s`, once."""
        reported: object = None
        while not self._stop.wait(min(self.timeout_s / 4, 1.0)):
            step = self._step
            if step is not None and step is not reported and time.monotonic() - step[0] > self.timeout_s:
                reported = step
                self.num_hangs += 1
                log.error("a step has not ended after %.1f s.\n%s\n%s", self.timeout_s, _description(step[1]), stacks())


def stacks() -> str:
    """The Python stacks of all threads, as text."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _description(describe: Callable[[], str]) -> str:
    """The result of `describe`, or a text about the error that it raised."""
    try:
        return describe()
    except Exception as error:  # it reads state that the hung loop was changing
        return f"the state cannot be read: {error!r}"
