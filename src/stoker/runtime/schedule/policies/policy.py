"""The interface of scheduling policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from stoker.runtime.request import Sequence


class Demand:
    """The number of blocks that admitting a sequence requires, and of those available. Blocks that it shares are not counted."""

    __slots__ = ("num_blocks_later", "num_blocks_now", "num_free", "num_holding", "num_reserved")

    def __init__(self, num_blocks_now: int, num_blocks_later: int, num_free: int, num_reserved: int, num_holding: int) -> None:
        self.num_blocks_now = num_blocks_now  # for its known tokens
        self.num_blocks_later = num_blocks_later  # after those, until it has max_tokens
        self.num_free = num_free
        self.num_reserved = num_reserved  # blocks by which the admitted sequences may still grow
        self.num_holding = num_holding  # sequences that held blocks when the planning of this step began

    @property
    def fits_to_the_end(self) -> bool:
        """Whether all admitted sequences, including this one, can reach max_tokens without a preemption."""
        return self.num_blocks_now + self.num_blocks_later + self.num_reserved <= self.num_free


class Policy(ABC):
    """Decides which sequence is admitted next, whether it is admitted now, and which one is preempted."""

    whole_batches = False  # admit beyond the token limit of the step, and without waiting for prefixes that other sequences compute

    def order(self, seq: Sequence) -> tuple[float, ...]:
        """The sort key by which sequences are admitted: priority, then arrival. It is unique per sequence, and changes only if that is
        late (`WaitingQueue.postpone`)."""
        return seq.priority, seq.arrival_order, seq.seq_id

    @abstractmethod
    def admits(self, demand: Demand) -> bool:
        """Whether the next sequence may be admitted now. If not, all others wait, too, so that a large sequence does not starve."""

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """The sequence to preempt when a running one needs a block and none is free. None: the running sequence waits."""
        return None
