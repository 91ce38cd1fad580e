"""max_utilization: fill the KV cache, and preempt when no block is free."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.policies.policy import Demand, Policy


class MaxUtilization(Policy):
    """Admits a sequence if its tokens and the block of its next decode fit. Highest throughput; some tokens are computed twice.

    The sequence that is last in the order of admission is preempted. The first one therefore always runs to its end, and so do all
    others in turn.
    """

    def admits(self, demand: Demand) -> bool:
        """Whether the blocks of the prompt are free, and one more if the sequence needs blocks later."""
        return demand.num_blocks_now + min(1, demand.num_blocks_later) <= demand.num_free

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """The sequence that is last in the order of admission."""
        return max(running, key=self.order, default=None)


POLICY = MaxUtilization
