"""Steps on their way from the leader to the other ranks: a ring of slots in memory that the processes share.

One writer, several readers, each with a counter of its own that only it writes; nobody takes a lock and nothing is pickled. The memory is
an anonymous file handed down by descriptor, so nothing is left when the processes are gone, however they end.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from stoker.runtime.worker.inputs import Packed, Shape, num_places

NUM_SLOTS = 8
HEADER = 16  # int32 of a slot before its numbers
LINE = 8  # int64 of a cache line: each counter has its own
STEP, FORGET, END = 1, 2, 3
_PUBLISHED, _LINES = 0, 1  # lines of the leader's counters; then two for each reader

# How long a reader spins for the next step before it naps: on a GPU the host must stay ahead of steps of a few milliseconds.
SPIN_S = {"cuda": 2e-3, "cpu": 0.0}
NAP_S, LONG_NAP_S, IDLE_S = 50e-6, 1e-3, 1.0


class Record(NamedTuple):
    """What a slot says: a step, blocks to forget, or the end."""

    kind: int
    packed: Packed | None
    all_greedy: bool
    blocks: list[int]


class Ring:
    """Either side of the ring. `slot_size`: int32 numbers that a slot holds at most."""

    def __init__(self, fd: int, num_readers: int, slot_size: int) -> None:
        self.fd, self.num_readers, self.slot_size = fd, num_readers, slot_size
        control = (_LINES + 2 * num_readers) * LINE * 8
        stride = (HEADER + slot_size + 15) // 16 * 16
        total = control + NUM_SLOTS * stride * 4
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, total)
        self._map = mmap.mmap(fd, total)
        self._control = np.frombuffer(self._map, np.int64, control // 8).reshape(-1, LINE)[:, 0]
        self._slots = np.frombuffer(self._map, np.int32, NUM_SLOTS * stride, control).reshape(NUM_SLOTS, stride)

    @staticmethod
    def create(num_readers: int, slot_size: int) -> Ring:
        return Ring(os.memfd_create("stoker-steps"), num_readers, slot_size)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last view of it."""
        os.close(self.fd)

    # The leader's side.

    def publish(self, header: tuple[int, ...], numbers: np.ndarray, check: Callable[[], None]) -> None:
        """Write the next slot. Waits while a reader is NUM_SLOTS behind; `check` raises when waiting is in vain."""
        published = int(self._control[_PUBLISHED])
        taken = self._control[_LINES::2]
        while published - int(taken.min()) >= NUM_SLOTS:
            check()
            time.sleep(NAP_S)
        slot = self._slots[published % NUM_SLOTS]
        slot[: len(header)] = header
        slot[HEADER : HEADER + len(numbers)] = numbers
        _fence()
        self._control[_PUBLISHED] = published + 1

    def beats_ns(self) -> list[int]:
        """When each reader last showed that it lives, by the monotonic clock."""
        return [int(beat) for beat in self._control[_LINES + 1 :: 2]]

    def lags(self) -> list[int]:
        """Slots that each reader has not finished with."""
        return [int(self._control[_PUBLISHED]) - int(taken) for taken in self._control[_LINES::2]]

    def position(self, reader: int) -> int:
        """Slots that a reader has finished with, all time."""
        return int(self._control[_LINES + 2 * reader])

    # A reader's side.

    def beat(self, reader: int) -> None:
        """Show that this process lives."""
        self._control[_LINES + 1 + 2 * reader] = time.monotonic_ns()

    def take(self, reader: int, spin_s: float) -> np.ndarray:
        """The next slot, when there is one. It stays as it is until `release`."""
        index = int(self._control[_LINES + 2 * reader])
        started = time.monotonic()
        while int(self._control[_PUBLISHED]) == index:
            waited = time.monotonic() - started
            if waited > spin_s:
                time.sleep(NAP_S if waited < IDLE_S else LONG_NAP_S)
        _fence()
        return self._slots[index % NUM_SLOTS]

    def release(self, reader: int) -> None:
        """The slot that was taken may be written again."""
        _fence()
        self._control[_LINES + 2 * reader] += 1


def step_size(max_num_tokens: int, max_rows: int, max_blocks: int) -> int:
    """The most numbers that a step has: four of each token, six of each row, and the rows' block tables."""
    return num_places((*[max_num_tokens] * 4, max_rows + 1, *[max_rows] * 5, max_rows * max_blocks))


def encode_step(packed: Packed, all_greedy: bool) -> tuple[int, ...]:
    """A step's header."""
    shape = packed.shape
    return (
        STEP, shape.tokens, shape.rows, shape.is_decode, packed.width, packed.num_logits, packed.num_sampled, packed.num_decodes,
        packed.max_query_len, packed.max_seq_len, packed.is_padded, all_greedy, packed.is_prefix_lm,
    )  # fmt: skip


def decode(slot: np.ndarray, buffer: Callable[[int], torch.Tensor]) -> Record:
    """What a slot says, copied out of it; a step's numbers into `buffer(size)`."""
    kind, *fields = (int(value) for value in slot[:13])
    if kind == FORGET:
        return Record(kind, None, False, slot[HEADER : HEADER + fields[0]].tolist())
    if kind != STEP:
        return Record(kind, None, False, [])
    *sizes, is_padded, all_greedy, is_prefix_lm = fields
    tokens, rows, is_decode, width, num_logits, num_sampled, num_decodes, max_query_len, max_seq_len = sizes
    packed = Packed(
        torch.empty(0), Shape(tokens, rows, bool(is_decode)), width, num_logits, num_sampled, num_decodes, max_query_len, max_seq_len,
        bool(is_padded), [], is_prefix_lm=bool(is_prefix_lm),
    )  # fmt: skip
    size = packed.num_places
    packed.host = buffer(size)
    packed.host.numpy()[:] = slot[HEADER : HEADER + size]
    return Record(kind, packed, bool(all_greedy), [])


_turnstile = threading.Lock()


def _fence() -> None:
    """Order what was written before against what follows, on machines whose stores may pass each other: a lock nobody waits for."""
    with _turnstile:
        pass
