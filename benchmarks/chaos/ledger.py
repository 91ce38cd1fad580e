"""The account of every request: what a quiet run answers, and what became of each request of the chaos run."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# same: the answer of the quiet run.
# refused: an error with a reason, in the format of the protocol; a stream had sent a part of the quiet answer before.
# left: the client disconnected on purpose; what it had received was a part of the quiet answer.
# cut: the connection ended without an answer, because the process that held it was killed in that time.
# wrong: another answer, or an answer or error in a wrong format.   lost: neither an answer nor a reason.
OUTCOMES = ("same", "refused", "left", "cut", "wrong", "lost")
MIN_S = 0.01  # a fault that was skipped lasts for less
GRACE_S = 2.0  # a connection that a killed process held is reported to its client within this time
UNEXPLAINED = "The server failed on this request"  # an error without a reason
MAX_EXAMPLES = 20


class Window(NamedTuple):
    """The time during which a fault lasted."""

    fault: str
    start_s: float
    end_s: float
    cuts: bool  # processes that hold connections are killed


class Ledger:
    """Counts outcomes by kind of request, refusals by reason and fault, and retains examples of wrong and lost requests."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.reasons: Counter[str] = Counter()
        self.quiet_refusals: Counter[str] = Counter()  # those outside of every fault
        self.examples: list[dict[str, str]] = []
        self.windows: list[Window] = []
        self._open: dict[int, Window] = {}

    @contextlib.contextmanager
    def fault(self, name: str, *, cuts: bool = False) -> Iterator[None]:
        """A fault lasts for the block."""
        key, start = len(self.windows) + len(self._open), time.monotonic()
        self._open[key] = Window(name, start, float("inf"), cuts)
        try:
            yield
        finally:
            window = self._open.pop(key)
            if time.monotonic() - start > MIN_S:
                self.windows.append(window._replace(end_s=time.monotonic() + GRACE_S))

    def during(self, start_s: float, end_s: float) -> list[Window]:
        """The faults that lasted at some time of this span."""
        recent = (window for window in reversed(self.windows[-200:]))
        return [window for window in (*self._open.values(), *recent) if window.start_s <= end_s and window.end_s >= start_s]

    def add(self, kind: str, outcome: str, span: tuple[float, float], detail: str = "") -> None:
        """Account for a request that lasted for the span. A cut connection is lost unless a fault explains it."""
        windows = self.during(*span)
        if outcome == "cut" and not any(window.cuts for window in windows):
            outcome = "lost"
        if outcome == "refused":
            reason = f"{_main(windows, span)}: {kind.split()[0]}: {_general(detail)}"
            self.reasons[reason] += 1
            if not windows:
                self.quiet_refusals[reason] += 1
            if UNEXPLAINED in detail:
                outcome = "wrong"
        if outcome in ("wrong", "lost") and len(self.examples) < MAX_EXAMPLES:
            faults = ", ".join(sorted({window.fault for window in windows}))
            lasted = f"{span[1] - span[0]:.1f} s"
            self.examples.append({"kind": kind, "outcome": outcome, "detail": detail[:600], "faults": faults, "lasted": lasted})
            print(f"{outcome}: {kind}: {detail[:200]} ({faults}; {lasted})", file=sys.stderr, flush=True)
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    @property
    def totals(self) -> dict[str, int]:
        """The number of requests by outcome."""
        total: Counter[str] = sum(self.outcomes.values(), Counter())
        return {outcome: total[outcome] for outcome in OUTCOMES}


def _main(windows: list[Window], span: tuple[float, float]) -> str:
    """The fault that lasted for the largest part of a span."""
    longest = max(windows, key=lambda window: min(window.end_s, span[1]) - max(window.start_s, span[0]), default=None)
    return longest.fault if longest is not None else "no fault"


def _general(reason: str) -> str:
    """A reason with numbers and paths replaced, so that equal ones are counted together."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"/[\w./-]+", "PATH", reason))[:160]
