"""Memory on each rank that its peers write messages into, so that a message is its own signal.

The scheme is that of TensorRT-LLM's "Lamport" all-reduce, NCCL's LL protocol without flags: an inbox holds a bit pattern that no message
contains (negative zero, sent as zero), and a reader looks until the pattern is gone. There is no barrier; one trip over NVLink is all.

A unit of a message has three places that it takes in turn. A kernel of turn n reads place n and empties place n - 1. A peer writes there
again in turn n + 2, which it reaches only after it read what this rank sent in turn n + 1, after the kernel of turn n had ended. Turns are
counted on the device, one counter a unit, so a captured graph may be replayed any number of times, and messages of different sizes mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TURNS = 3
# Negative zero as a 16-bit float, twice. As a float32 it is a number too small to matter.
EMPTY = -0x7FFF8000
UNIT_BYTES = 2048
# Of a message. More programs than run at once, but every GPU begins them in the same order: none waits for one that cannot begin.
MAX_BYTES = 4 << 20
# One-shot up to so many bytes, then two-shot: one-shot sends everything to everyone, which two ranks do either way. Measured on 2 and 4
# H200s (benchmarks/results/h200x4_allreduce.json): of 128 and 256 KiB on four, 3.8 and 7.2 µs in one shot, 4.2 and 6.1 in two. Eight ranks
# were not measured.
ONE_SHOT_BYTES = {2: MAX_BYTES, 4: 128 << 10, 8: 64 << 10}


@dataclass(frozen=True, slots=True)
class Inbox:
    """Places for messages of up to `num_units` units, [TURNS, num_units, num_slots, UNIT_BYTES] on each rank."""

    addresses: tuple[int, ...]  # where each rank's places begin, as this rank's device sees them
    turns: Tensor  # int32 [num_units]
    rank: int
    num_ranks: int
    num_units: int
    is_two_shot: bool

    @property
    def num_slots(self) -> int:
        """One for each rank's part, and in a two-shot exchange one for the sum."""
        return self.num_ranks + self.is_two_shot

    @property
    def num_bytes(self) -> int:
        return TURNS * self.num_units * self.num_slots * UNIT_BYTES


class Inboxes:
    """One inbox for each way of summing, one after the other in memory of `memory_bytes` on each rank."""

    def __init__(self, bases: list[int], rank: int, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        """`bases`: the address of each rank's memory, which holds EMPTY everywhere before any rank uses it."""
        self.rank, self.num_ranks, self.max_bytes = rank, len(bases), max_bytes
        self.one_shot_bytes = ONE_SHOT_BYTES[self.num_ranks]
        made, used = [], 0
        for is_two_shot in (False, True):
            num_units = max_bytes // UNIT_BYTES
            turns = torch.zeros(num_units, dtype=torch.int32, device=device)
            made.append(Inbox(tuple(base + used for base in bases), turns, rank, self.num_ranks, num_units, is_two_shot))
            used += made[-1].num_bytes
        self.one_shot, self.two_shot = made

    def suited(self, num_bytes: int) -> Inbox | None:
        """For a message of `num_bytes`, the inbox that serves it sooner; None: it is too big."""
        if not 0 < num_bytes <= self.max_bytes:
            return None
        return self.one_shot if num_bytes <= self.one_shot_bytes else self.two_shot


def memory_bytes(num_ranks: int, max_bytes: int = MAX_BYTES) -> int:
    """What a rank's inboxes take: 60 MiB on two ranks, 108 on four, 204 on eight."""
    return TURNS * max_bytes * (2 * num_ranks + 1)
