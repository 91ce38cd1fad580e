"""Inboxes: memory of each rank that its peers write to, for all-reduces in which the arrival of data is its own signal.

The protocol is that of TensorRT-LLM's "Lamport" all-reduce, or NCCL's LL protocol without flags: an inbox is filled with a bit pattern that
no message contains (negative zero, which is sent as zero), and the receiver polls until the pattern is gone. There is no barrier; the
latency is that of one write over NVLink.

Each unit of a message has three buffers, used in rotation. The kernel of turn n reads buffer n and refills buffer n - 1 with the pattern. A
peer writes to that buffer again in turn n + 2. It reaches turn n + 2 only after it has received what this rank sent in turn n + 1, that is,
after the kernel of turn n has ended. Turns are counted on the device, with one counter per unit, so that a captured graph can be replayed
any number of times, and messages of different sizes can be mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TURNS = 3
# Two 16-bit negative zeros. As a float32, it is too small to change a sum.
EMPTY = -0x7FFF8000
UNIT_BYTES = 2048
# Of a message. It has more CTAs than can run at the same time, but every GPU starts them in the same order, so that no CTA waits for one
# that cannot start.
MAX_BYTES = 4 << 20
# Largest message of the one-shot algorithm by number of ranks; larger ones use the two-shot algorithm. One-shot sends the whole message to
# every rank, which is the same for two ranks. Measured on 2 and 4 H200 (benchmarks/results/h200x4_allreduce.json): for 128 and 256 KiB on 4
# ranks, one-shot takes 3.8 and 7.2 µs, two-shot 4.2 and 6.1 µs. Eight ranks were not measured.
ONE_SHOT_BYTES = {2: MAX_BYTES, 4: 128 << 10, 8: 64 << 10}


@dataclass(frozen=True, slots=True)
class Inbox:
    """Buffers for messages of up to `num_units` units: [TURNS, num_units, num_slots, UNIT_BYTES] bytes on each rank."""

    addresses: tuple[int, ...]  # of the buffers of each rank, in the address space of this rank's device
    turns: Tensor  # int32 [num_units]
    rank: int
    num_ranks: int
    num_units: int
    is_two_shot: bool

    @property
    def num_slots(self) -> int:
        """The number of slots: one for the data of each rank and, in the two-shot algorithm, one for the sum."""
        return self.num_ranks + self.is_two_shot

    @property
    def num_bytes(self) -> int:
        """The size of the inbox of one rank in bytes."""
        return TURNS * self.num_units * self.num_slots * UNIT_BYTES


class Inboxes:
    """The inboxes of both algorithms, one after the other in `memory_bytes` bytes on each rank."""

    def __init__(self, bases: list[int], rank: int, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        """`bases`: the address of the memory of each rank, which must be filled with EMPTY before any rank uses it."""
        self.rank, self.num_ranks, self.max_bytes = rank, len(bases), max_bytes
        # Of a persistent kernel, whose CTAs exchange data by number: the smallest number of SMs of a rank. None: that of this device.
        self.num_ctas: int | None = None
        self.one_shot_bytes = ONE_SHOT_BYTES[self.num_ranks]
        inboxes, offset = [], 0
        for is_two_shot in (False, True):
            num_units = max_bytes // UNIT_BYTES
            turns = torch.zeros(num_units, dtype=torch.int32, device=device)
            inboxes.append(Inbox(tuple(base + offset for base in bases), turns, rank, self.num_ranks, num_units, is_two_shot))
            offset += inboxes[-1].num_bytes
        self.one_shot, self.two_shot = inboxes

    def select(self, num_bytes: int) -> Inbox | None:
        """The inbox of the faster algorithm for a message of `num_bytes`; None if the message is empty or too large."""
        if not 0 < num_bytes <= self.max_bytes:
            return None
        return self.one_shot if num_bytes <= self.one_shot_bytes else self.two_shot


def memory_bytes(num_ranks: int, max_bytes: int = MAX_BYTES) -> int:
    """The size in bytes of the inboxes of one rank: 60 MiB for two ranks, 108 MiB for four, 204 MiB for eight."""
    return TURNS * max_bytes * (2 * num_ranks + 1)
