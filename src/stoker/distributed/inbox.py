"""Memory on each rank that its peers write messages into, so that a message is its own signal.

The scheme is that of TensorRT-LLM's "Lamport" all-reduce, NCCL's LL protocol without flags: an inbox holds a bit pattern that no message
contains (negative zero, sent as zero), and a reader looks until the pattern is gone. There is no barrier; one trip over NVLink is all.

A unit of a message has three places that it takes in turn. A kernel of turn n reads place n and empties place n - 1. A peer writes there
again in turn n + 2, which it reaches only after it read what this rank sent in turn n + 1, after the kernel of turn n had ended. Turns are
counted on the device, one counter a unit, so a captured graph may be replayed any number of times, and kernels of different sizes mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TURNS = 3
# Negative zero as a 16-bit float, twice. As a float32 it is a number too small to matter.
EMPTY = -0x7FFF8000
UNIT_BYTES = 2048  # of a message that need not be cut by rows
MAX_BYTES = 1 << 20  # of a message
# One-shot up to so many bytes, then two-shot: one-shot sends everything to everyone. Between two ranks both send the same.
ONE_SHOT_BYTES = {2: 1 << 20, 4: 256 << 10, 8: 64 << 10}
MEMORY_BYTES = 128 << 20  # what eight ranks take for messages cut either way, sent either way, is 102 MiB


@dataclass(frozen=True, slots=True)
class Inbox:
    """Places for messages of up to `num_units` units, [TURNS, num_units, num_slots, unit_bytes] on each rank."""

    addresses: tuple[int, ...]  # where each rank's places begin, as this rank's device sees them
    turns: Tensor  # int32 [num_units]
    rank: int
    num_ranks: int
    num_units: int
    num_slots: int  # one for each rank's part, and in a two-shot exchange one for the sum
    unit_bytes: int

    @property
    def is_two_shot(self) -> bool:
        return self.num_slots > self.num_ranks


class Inboxes:
    """The inboxes that one stretch of memory, equally big on each rank, is cut into."""

    def __init__(self, bases: list[int], num_bytes: int, rank: int, device: torch.device) -> None:
        """`bases`: the address of each rank's memory, which holds EMPTY everywhere before any rank uses it."""
        self.rank, self.num_ranks = rank, len(bases)
        self.one_shot_bytes = ONE_SHOT_BYTES[self.num_ranks]
        self._bases, self._device = bases, device
        self._free, self._end = 0, num_bytes
        self._made: dict[tuple[int, bool], Inbox | None] = {}

    def suited(self, num_bytes: int, unit_bytes: int) -> Inbox | None:
        """For a message of `num_bytes`, the inbox that serves it sooner; None: it is too big."""
        return self.get(unit_bytes, num_bytes > self.one_shot_bytes) if 0 < num_bytes <= MAX_BYTES else None

    def get(self, unit_bytes: int, is_two_shot: bool) -> Inbox | None:
        """For messages of up to MAX_BYTES in units of `unit_bytes`; None: no room is left. Every rank asks in the same order."""
        key = (unit_bytes, is_two_shot)
        if key not in self._made:
            self._made[key] = self._cut(unit_bytes, is_two_shot, MAX_BYTES // unit_bytes)
        return self._made[key]

    def _cut(self, unit_bytes: int, is_two_shot: bool, num_units: int) -> Inbox | None:
        num_slots = self.num_ranks + is_two_shot
        size = TURNS * num_units * num_slots * unit_bytes
        if unit_bytes % 16 or not num_units or self._free + size > self._end:
            return None
        turns = torch.zeros(num_units, dtype=torch.int32, device=self._device)
        inbox = Inbox(tuple(base + self._free for base in self._bases), turns, self.rank, self.num_ranks, num_units, num_slots, unit_bytes)
        self._free += size
        return inbox
