"""What goes on by itself while a program runs, and is waited for: copies, and products of four warps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from emulated.operands import Mask

Threads = NDArray[np.int64]
Action = Callable[[], None]


class Queue:
    """What each warp has asked for and not waited for. It is done as late as waiting allows, so that who does not wait is found."""

    def __init__(self, num_warps: int) -> None:
        self._open: list[list[Action]] = [[] for _ in range(num_warps)]
        self._groups: list[list[list[Action]]] = [[] for _ in range(num_warps)]

    def _warps(self, mask: Mask) -> list[int]:
        return [w for w in range(len(self._open)) if mask is None or mask[32 * w : 32 * w + 32].any()]

    def ask(self, mask: Mask, action: Callable[[Threads], None]) -> None:
        """action: of the threads of one warp that take part."""
        for warp in self._warps(mask):
            lanes = np.arange(32 * warp, 32 * warp + 32)
            self._open[warp].append(partial(action, lanes if mask is None else lanes[mask[lanes]]))

    def close(self, mask: Mask) -> None:
        """What was asked for since the last call is a group."""
        for warp in self._warps(mask):
            self._groups[warp].append(self._open[warp])
            self._open[warp] = []

    def wait(self, mask: Mask, after: int) -> None:
        """For all groups but the last `after`."""
        for warp in self._warps(mask):
            while len(self._groups[warp]) > after:
                for action in self._groups[warp].pop(0):
                    action()


class Arrivals:
    """A barrier in shared memory (mbarrier): its phase ends when all have come and all bytes are there."""

    def __init__(self, count: int) -> None:
        self._count = self._missing = count
        self._bytes = self._phase = 0
        self._copies: list[Action] = []
        self._asked_again = False

    def expect(self, num_bytes: int) -> None:
        """Come, and expect bytes before the phase ends."""
        self._missing -= 1
        self._bytes += num_bytes

    def bring(self, num_bytes: int, copy: Action) -> None:
        """A copy on its way."""

        def arrive() -> None:
            copy()
            self._bytes -= num_bytes

        self._copies.append(arrive)

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of that parity has; on the way, at first not."""
        if self._phase % 2 == parity and self._copies and self._asked_again:
            for copy in self._copies:
                copy()
            self._copies.clear()
        self._asked_again = True
        if self._missing == 0 and self._bytes == 0:
            self._missing, self._phase, self._asked_again = self._count, self._phase + 1, False
        return self._phase % 2 != parity
