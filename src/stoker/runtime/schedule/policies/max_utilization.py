"""max_utilization: fill the memory, and preempt when it runs out."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.policies.policy import Demand, Policy


class MaxUtilization(Policy):
    """Admit while a sequence's tokens and the block of its next decode fit. Most tokens a second; some are computed twice.

    The victim is the last in the order of admission, so the first one always runs, and with it everyone in the end.
    """

    def admits(self, demand: Demand) -> bool:
        return demand.num_blocks_now + min(1, demand.num_blocks_later) <= demand.num_free

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return max(running, key=self.order, default=None)
