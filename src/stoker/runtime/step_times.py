"""How long the last steps took."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

KEPT = 8192


class StepTime(NamedTuple):
    """One step: from its launch, or the end of the one before it, until its tokens were on the host."""

    duration_s: float
    rows: int
    tokens: int

    @property
    def is_decode(self) -> bool:
        return self.rows == self.tokens


class StepTimes:
    """The newest KEPT steps, and the sum of all."""

    def __init__(self) -> None:
        self.recent: deque[StepTime] = deque(maxlen=KEPT)
        self.total_s = 0.0
        self._end = 0.0

    def record(self, launched_s: float, rows: int, tokens: int) -> float:
        """A step that was launched at `launched_s` by the monotonic clock ends now. Returns its duration."""
        now = time.monotonic()
        duration = now - max(launched_s, self._end)
        self._end = now
        self.total_s += duration
        self.recent.append(StepTime(duration, rows, tokens))
        return duration
