"""The interface of plan channels, which carry records from the leader of a worker group to its followers.

A record has a header of at most HEADER_SIZE int32 and at most `record_size` further int32. Every follower receives all records in the
order in which they were published.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

HEADER_SIZE = 32

Numbers = np.ndarray[Any, np.dtype[np.int32]]


class PlanChannel(ABC):
    """The leader's end."""

    @abstractmethod
    def publish(self, header: tuple[int, ...], numbers: Numbers, check: Callable[[], None]) -> None:
        """Send a record. If a follower is too far behind, waits for it and calls `check`, which raises when a follower has failed."""

    @abstractmethod
    def heartbeats_ns(self) -> list[int]:
        """Monotonic time, on this host, of the last heartbeat of each follower; 0 before the first one."""

    @abstractmethod
    def positions(self) -> list[int]:
        """The number of records that each follower has released so far."""

    @abstractmethod
    def lags(self) -> list[int]:
        """The number of published records that each follower has not released."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this end."""


class PlanReader(ABC):
    """A follower's end."""

    @abstractmethod
    def receive(self, spin_s: float) -> Numbers:
        """Wait for the next record and return it: HEADER_SIZE int32, then its numbers. The array is valid until `release`.

        Spins for `spin_s` seconds and sleeps between checks after that.
        """

    @abstractmethod
    def release(self) -> None:
        """Declare that the record which `receive` returned has been processed, so that its memory can be reused."""

    @abstractmethod
    def beat(self) -> None:
        """Send a heartbeat. May be called from another thread."""
