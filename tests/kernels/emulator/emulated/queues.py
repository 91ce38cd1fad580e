"""Asynchronous operations: copies and products of wgmma, which threads wait for in groups, and mbarriers, which count arrivals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from emulated.operands import Mask

Threads = NDArray[np.int64]
Action = Callable[[], None]


class Operation:
    """An asynchronous operation of one warp, which does nothing when it is called again."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self.has_run = False

    def __call__(self) -> None:
        if not self.has_run:
            self.has_run = True
            self._action()


class Queue:
    """The asynchronous operations of each warp. They run as late as the waits allow, so that a missing wait gives a wrong result."""

    def __init__(self, num_warps: int) -> None:
        self._open: list[list[Operation]] = [[] for _ in range(num_warps)]
        self._groups: list[list[list[Operation]]] = [[] for _ in range(num_warps)]

    def _warps(self, mask: Mask) -> list[int]:
        return [w for w in range(len(self._open)) if mask is None or mask[32 * w : 32 * w + 32].any()]

    def issue(self, mask: Mask, action: Callable[[Threads], None]) -> None:
        """Add an operation to the open group of each active warp. action: performs it for the active threads of one warp."""
        for warp in self._warps(mask):
            lanes = np.arange(32 * warp, 32 * warp + 32)
            self._open[warp].append(Operation(partial(action, lanes if mask is None else lanes[mask[lanes]])))

    def commit(self, mask: Mask) -> None:
        """Close the open group of each active warp."""
        for warp in self._warps(mask):
            self._groups[warp].append(self._open[warp])
            self._open[warp] = []

    def pending(self, mask: Mask) -> list[Operation]:
        """The operations of the active warps that have not run. They stay in their groups; an operation runs only once."""
        for warp in self._warps(mask):
            self._open[warp] = [action for action in self._open[warp] if not action.has_run]
        return [action for warp in self._warps(mask) for group in [*self._groups[warp], self._open[warp]] for action in group]

    def wait(self, mask: Mask, pending: int) -> None:
        """Run the groups of each active warp until at most `pending` remain."""
        for warp in self._warps(mask):
            while len(self._groups[warp]) > pending:
                for action in self._groups[warp].pop(0):
                    action()


class Arrivals:
    """An mbarrier in shared memory. A phase ends when `count` threads have arrived and all expected bytes have been copied.

    number: its index in `Clock.observed`.
    """

    def __init__(self, count: int, number: int) -> None:
        self.number = number
        self._count = self._missing = count
        self._bytes = self._phase = 0
        self._copies: list[Action] = []
        self._was_polled = False

    @property
    def has_pending_copies(self) -> bool:
        return bool(self._copies)

    def arrive(self, count: int) -> None:
        """Add `count` arrivals."""
        self._missing -= count
        assert self._missing >= 0, "more arrivals than the mbarrier expects"
        self._end_if_complete()

    def expect(self, num_bytes: int) -> None:
        """Arrive, and add to the bytes that must be copied before the phase ends."""
        self._bytes += num_bytes
        self.arrive(1)

    def issue_copy(self, num_bytes: int, copy: Action, num_arrivals: int = 0) -> None:
        """Add copies, after which there are `num_arrivals` arrivals. They run when the phase is polled for the second time."""

        def arrive() -> None:
            copy()
            self._bytes -= num_bytes
            self._missing -= num_arrivals

        self._copies.append(arrive)

    def has_ended(self, parity: int) -> bool:
        """Whether the phase with this parity has ended. The first poll of a phase with copies returns False."""
        if self._phase % 2 == parity and self._copies and self._was_polled:
            for copy in self._copies:
                copy()
            self._copies.clear()
        self._was_polled = True
        self._end_if_complete()
        return self._phase % 2 != parity

    def _end_if_complete(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self._missing, self._phase, self._was_polled = self._count, self._phase + 1, False
