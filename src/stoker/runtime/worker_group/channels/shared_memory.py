"""shared_memory: a queue of NUM_SLOTS records in memory that the processes of one host share.

One writer and several readers, each with a counter that only it writes. There is no lock, and nothing is serialized. The memory is an
anonymous file whose descriptor the followers receive, so that nothing remains when the processes end, however they end.

    int64, one cache line each:  published │ released by reader 0 │ heartbeat of reader 0 │ released by reader 1 │ ...
    int32:                       slot 0: header, numbers │ slot 1 │ ... │ slot NUM_SLOTS - 1
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from stoker.runtime.worker_group.channels.channel import HEADER_SIZE, Numbers, PlanChannel, PlanReader

NUM_SLOTS = 8
CACHE_LINE = 8  # int64
NAP_S, LONG_NAP_S, IDLE_S = 50e-6, 1e-3, 1.0  # sleep between checks, after IDLE_S without a record the longer one


class ChannelAddress(msgspec.Struct, frozen=True):
    """The data with which a follower opens its end of a channel."""

    num_readers: int
    record_size: int
    fd: int  # descriptor in this process


class _Memory:
    """Views of the shared memory of either end."""

    def __init__(self, fd: int, num_readers: int, record_size: int) -> None:
        counters = (1 + 2 * num_readers) * CACHE_LINE * 8
        stride = (HEADER_SIZE + record_size + 15) // 16 * 16
        total = counters + NUM_SLOTS * stride * 4
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, total)
        self._map = mmap.mmap(fd, total)
        control = np.frombuffer(self._map, np.int64, counters // 8).reshape(-1, CACHE_LINE)[:, 0]
        self.published, self.released, self.heartbeats = control[:1], control[1::2], control[2::2]
        self.slots = np.frombuffer(self._map, np.int32, NUM_SLOTS * stride, counters).reshape(NUM_SLOTS, stride)


class SharedMemoryChannel(PlanChannel):
    """The leader's end. `record_size`: int32 of a record after its header, at most."""

    def __init__(self, num_readers: int, record_size: int) -> None:
        self._fd = os.memfd_create("stoker-steps")
        self._memory = _Memory(self._fd, num_readers, record_size)
        self.address = ChannelAddress(num_readers, record_size, self._fd)

    def publish(self, header: tuple[int, ...], numbers: Numbers, check: Callable[[], None]) -> None:
        """Wait for a slot that all followers have released, write the record into it, and make it visible to them.

        `check` is called while it waits, and raises an exception to end the wait.
        """
        memory = self._memory
        published, released = int(memory.published[0]), memory.released
        while published - int(released.min()) >= NUM_SLOTS:
            check()
            time.sleep(NAP_S)
        slot = memory.slots[published % NUM_SLOTS]
        slot[: len(header)] = header
        slot[HEADER_SIZE : HEADER_SIZE + len(numbers)] = numbers
        _fence()
        memory.published[0] = published + 1

    def heartbeats_ns(self) -> list[int]:
        """The monotonic time of each follower's last sign of life, in nanoseconds."""
        return [int(beat) for beat in self._memory.heartbeats]

    def positions(self) -> list[int]:
        """The number of records that each follower has processed."""
        return [int(released) for released in self._memory.released]

    def lags(self) -> list[int]:
        """The number of published records that each follower has not processed yet."""
        return [int(self._memory.published[0]) - released for released in self.positions()]

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last view of it."""
        os.close(self._fd)


class SharedMemoryReader(PlanReader):
    """The end of the follower with index `reader`."""

    def __init__(self, address: ChannelAddress, reader: int) -> None:
        self._memory = _Memory(address.fd, address.num_readers, address.record_size)
        self._reader = reader

    def receive(self, spin_s: float) -> Numbers:
        published, index = self._memory.published, int(self._memory.released[self._reader])
        started = time.monotonic()
        while int(published[0]) == index:
            waited = time.monotonic() - started
            if waited > spin_s:
                time.sleep(NAP_S if waited < IDLE_S else LONG_NAP_S)
        _fence()
        slot: Numbers = self._memory.slots[index % NUM_SLOTS]
        return slot

    def release(self) -> None:
        """The current record has been processed: its slot may be overwritten."""
        _fence()
        self._memory.released[self._reader] += 1

    def beat(self) -> None:
        """Set the time of this follower's last sign of life to now."""
        self._memory.heartbeats[self._reader] = time.monotonic_ns()


_fence_lock = threading.Lock()


def _fence() -> None:
    """Order earlier stores before later ones on processors that may reorder stores: an uncontended lock is a full fence."""
    with _fence_lock:
        pass
