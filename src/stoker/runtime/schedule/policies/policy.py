"""What a scheduling policy decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from stoker.runtime.request import Sequence


class Demand:
    """What admitting a sequence would take, and what there is. Blocks that it shares are counted in no number."""

    __slots__ = ("num_blocks_later", "num_blocks_now", "num_free", "num_holding", "num_reserved")

    def __init__(self, num_blocks_now: int, num_blocks_later: int, num_free: int, num_reserved: int, num_holding: int) -> None:
        self.num_blocks_now = num_blocks_now  # for the tokens it has
        self.num_blocks_later = num_blocks_later  # after those, until it has max_tokens
        self.num_free = num_free  # free blocks
        self.num_reserved = num_reserved  # blocks by which the admitted sequences may still grow
        self.num_holding = num_holding  # sequences that held blocks when the planning of this step began

    @property
    def fits_to_the_end(self) -> bool:
        """Every admitted sequence, this one included, can run to its max_tokens without taking a block from another."""
        return self.num_blocks_now + self.num_blocks_later + self.num_reserved <= self.num_free


class Policy(ABC):
    """Who is next, who may be admitted, who is given up."""

    whole_batches = False  # admit a batch at once: beyond the step's tokens, and without waiting for prefixes others compute

    def order(self, seq: Sequence) -> tuple:
        """Sequences are admitted from the smallest on: by priority, then arrival."""
        return seq.priority, seq.arrival, seq.seq_id

    @abstractmethod
    def admits(self, demand: Demand) -> bool:
        """Whether the next sequence gets blocks now. When not, those behind it wait too, so a large one isn't passed for ever."""

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """Who gives its blocks up when a running sequence needs one and none is free; None: nobody."""
        return None
