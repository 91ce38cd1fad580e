"""Durations of recent steps."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

MAX_RECENT = 8192


class StepTime(NamedTuple):
    """One step. Its duration starts at its launch or at the end of the previous step, and ends when its tokens are on the host."""

    duration_s: float
    rows: int
    tokens: int

    @property
    def is_decode(self) -> bool:
        """Whether each row had one token."""
        return self.rows == self.tokens


class StepTimes:
    """The newest MAX_RECENT steps, and the total duration of all steps."""

    def __init__(self) -> None:
        self.recent: deque[StepTime] = deque(maxlen=MAX_RECENT)
        self.total_s = 0.0
        self._end = 0.0

    def record(self, launched_s: float, rows: int, tokens: int) -> float:
        """Record a step that was launched at the monotonic time `launched_s` and ends now. Returns its duration in seconds."""
        now = time.monotonic()
        duration = now - max(launched_s, self._end)
        self._end = now
        self.total_s += duration
        self.recent.append(StepTime(duration, rows, tokens))
        return duration
