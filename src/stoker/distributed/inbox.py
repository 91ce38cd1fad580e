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
FUSED_LAYER_UNITS = 256  # one for each CTA of a persistent kernel, of which an SM has one
# Largest message by number of ranks. It has more CTAs than can run at the same time, but every GPU starts them in the same order, so that
# no CTA waits for one that cannot start. On two H200s, 6 MiB (768 tokens of Mixtral, 384 of Llama-3.1-70B) took 34 µs in PyTorch's kernel,
# with a copy and an addition 42, where 4 MiB with the residual take 17 here.
MAX_BYTES = {2: 16 << 20, 4: 4 << 20, 8: 4 << 20}
# Largest message of the one-shot algorithm; larger ones use the two-shot algorithm. One-shot sends the whole message to every other rank;
# two ranks send as much in both, and always use it. Measured on 2 and 4 H200s (benchmarks/results/h200x4_allreduce.json): for 128 and 256
# KiB on 4 ranks, one-shot takes 3.8 and 7.2 µs, two-shot 4.2 and 6.1 µs. Eight ranks were not measured.
ONE_SHOT_BYTES = {2: MAX_BYTES[2], 4: 128 << 10, 8: 64 << 10}


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
    """The inboxes of a rank, one after the other in `memory_bytes` bytes: one for each algorithm of all-reduces, and that of fused layers.

    Two ranks have only the one-shot algorithm. All kernels of an inbox write and refill the same slots.
    """

    def __init__(self, bases: list[int], rank: int, device: torch.device, max_bytes: int | None = None) -> None:
        """`bases`: the address of the memory of each rank, which must be filled with EMPTY before any rank uses it."""
        self.rank, self.num_ranks = rank, len(bases)
        self.max_bytes = MAX_BYTES[self.num_ranks] if max_bytes is None else max_bytes
        # Of a persistent kernel, whose CTAs exchange data by number: the smallest number of SMs of a rank. None: that of this device.
        self.num_ctas: int | None = None
        self.one_shot_bytes = ONE_SHOT_BYTES[self.num_ranks]
        offset = 0

        def inbox(num_units: int, *, is_two_shot: bool = False) -> Inbox:
            """The next inbox in the memory."""
            nonlocal offset
            turns = torch.zeros(num_units, dtype=torch.int32, device=device)
            found = Inbox(tuple(base + offset for base in bases), turns, rank, len(bases), num_units, is_two_shot)
            offset += found.num_bytes
            return found

        units = self.max_bytes // UNIT_BYTES
        self.one_shot = inbox(units)
        self.two_shot = None if self.num_ranks == 2 else inbox(units, is_two_shot=True)
        self.fused_layers = inbox(FUSED_LAYER_UNITS)

    @property
    def all_reduces(self) -> tuple[Inbox, ...]:
        """The inbox of each algorithm of all-reduces."""
        return (self.one_shot,) if self.two_shot is None else (self.one_shot, self.two_shot)

    def select(self, num_bytes: int) -> Inbox | None:
        """The inbox of the faster algorithm for a message of `num_bytes`; None if the message is empty or too large."""
        if not 0 < num_bytes <= self.max_bytes:
            return None
        return self.one_shot if num_bytes <= self.one_shot_bytes or self.two_shot is None else self.two_shot


def memory_bytes(num_ranks: int, max_bytes: int | None = None) -> int:
    """The size in bytes of the inboxes of one rank: 99 MiB for two ranks, 114 MiB for four, 216 MiB for eight."""
    slots = 2 if num_ranks == 2 else 2 * num_ranks + 1
    messages = (MAX_BYTES[num_ranks] if max_bytes is None else max_bytes) * slots
    return TURNS * (messages + FUSED_LAYER_UNITS * UNIT_BYTES * num_ranks)
