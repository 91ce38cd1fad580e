"""Decides whether and when a process that has ended is started again: after a delay that doubles, a limited number of times in a row."""

from __future__ import annotations

import time

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0  # before a restart; the delay doubles with each restart in a row
STABLE_S = 60.0  # a process that was ready for this time starts with no restarts again


class RestartPolicy:
    """The restarts of one process."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0  # in a row
        self._ready_at: float | None = None

    def note_ready(self) -> None:
        """The process is ready from now on."""
        self._ready_at = time.monotonic()

    def next_delay_s(self) -> float | None:
        """The time before the next restart of the process, which has ended. None: it is not started again."""
        if self._ready_at is not None and time.monotonic() - self._ready_at > STABLE_S:
            self.num_restarts = 0
        self._ready_at = None
        if self.num_restarts >= self.max_restarts:
            return None
        self.num_restarts += 1
        return float(min(FIRST_DELAY_S * 2 ** (self.num_restarts - 1), MAX_DELAY_S))
