"""Records when a process reaches the stages of its start, so that the log shows where the time of a start goes."""

from __future__ import annotations

import time

from stoker.base.logging import LogEvent


class StartReport(LogEvent, kw_only=True):
    """The stages of the start of one process, in the order in which they were reached."""

    process: str
    began_at: float  # seconds since 1970
    stages: dict[str, float]  # stage: seconds after `began_at` when it was reached

    def __str__(self) -> str:
        return f"start of {self.process}: {', '.join(f'{stage} {seconds:.2f} s' for stage, seconds in self.stages.items())}"


class StartTimes:
    """The times at which this process reached the stages of its start."""

    def __init__(self) -> None:
        self._began_at, self._began = time.time(), time.monotonic()
        self._stages: dict[str, float] = {}

    def reached(self, stage: str) -> None:
        """Record that `stage` is complete."""
        self._stages[stage] = round(time.monotonic() - self._began, 3)

    def report(self, process: str) -> StartReport:
        """The stages so far, of the process called `process`."""
        return StartReport(process=process, began_at=self._began_at, stages=dict(self._stages))
