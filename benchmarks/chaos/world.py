"""What faults act on, and their table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from chaos.ledger import Ledger
from chaos.server import Server

STABLE_S, MAX_KILLS = 75.0, 3  # the supervisor forgets earlier restarts of a process that was ready for a minute


class Skipped(Exception):
    """The fault cannot be caused on this machine, for this reason."""


class World:
    """The server under test, its account, and the places that faults change."""

    def __init__(self, server: Server, ledger: Ledger, random: Random, folder: Path, engine: Path, scale: float) -> None:
        self.server, self.ledger, self.random = server, ledger, random
        self.folder, self.engine = folder, engine
        self.scale = scale  # of durations: less than 1 for short runs
        self.clock = folder / "clock"  # seconds that the server's wall clock differs, as a double
        self.disk: Path | None = None  # a small file system, with the state and the temporary files of the server
        self.disk_reason = ""  # why there is none
        self.stub = False  # the executor has no model
        self.step_timeout_s = 0.0  # of the executor
        self._kills: dict[str, list[float]] = {}  # times, by role
        self.counts: Counter[str] = Counter()  # faults by name
        self.skipped: dict[str, str] = {}

    def seconds(self, low: float, high: float) -> float:
        """A random duration."""
        return self.random.uniform(low, high) * self.scale

    def one(self, role: str) -> int:
        """A random process with this role. Raises RuntimeError if there is none."""
        pids = self.server.pids(role)
        if not pids:
            raise RuntimeError(f"the server has no {role}")
        return self.random.choice(pids)

    def may_kill(self, role: str) -> bool:
        """Whether a process of this role may be killed now, and note that it is: delays before restarts double if it happens often."""
        recent = [at for at in self._kills.get(role, []) if time.monotonic() - at < STABLE_S]
        self._kills[role] = [*recent, time.monotonic()] if len(recent) < MAX_KILLS else recent
        return len(recent) < MAX_KILLS


class Fault(NamedTuple):
    """One kind of fault. `cause` returns when it is over and has been undone."""

    name: str
    cause: Callable[[World], Awaitable[None]]
    replaces: bool  # processes are replaced, or memory grows to a new size: in the first half of a run only
    cuts: bool  # processes that hold connections of clients are killed
    role: str  # only servers with a process of this role have the fault; empty: all


FAULTS: dict[str, Fault] = {}
Cause = Callable[[World], Awaitable[None]]


def fault(name: str, *, role: str = "", replaces: bool = False, cuts: bool = False) -> Callable[[Cause], Cause]:
    """Add the decorated function to FAULTS."""

    def add(cause: Cause) -> Cause:
        FAULTS[name] = Fault(name, cause, replaces, cuts, role)
        return cause

    return add
