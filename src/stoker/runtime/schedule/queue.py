"""The waiting queue: sequences without blocks, which are new, preempted, or parked until another sequence has computed their prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any

from stoker.runtime.request import Sequence, Status


class WaitingQueue:
    """Sequences in the order of `key`, which is unique. Push, pop and park cost O(log n). Sequences that ended are skipped."""

    def __init__(self, key: Callable[[Sequence], tuple[Any, ...]]) -> None:
        self._key = key
        self._new: list[tuple[Any, Sequence]] = []
        self._preempted: list[tuple[Any, Sequence]] = []
        self._parked: dict[int, list[tuple[int, Sequence]]] = {}  # seq_id of the producer → (number of its blocks, sequence)
        self.num_new = 0
        self.num_preempted = 0
        self.num_tokens = 0  # of all sequences
        self._num_ended = 0
        self._pop_times: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return self.num_new + self.num_preempted

    def push(self, seq: Sequence) -> None:
        """Add a sequence with status WAITING."""
        self._count(seq, 1)
        self._insert(seq)

    def peek(self, *, preempted_only: bool = False) -> Sequence | None:
        """The first sequence that is not parked, or None."""
        heap = self._first(preempted_only)
        return heap[0][1] if heap else None

    def pop(self, seq: Sequence, now: float) -> None:
        """Remove `seq`, which `peek` returned."""
        heappop(self._heap(seq))
        self._count(seq, -1)
        if not self.num_new:
            self._pop_times.clear()
        elif not seq.num_preemptions:
            self._pop_times.append(now)

    def first(self, count: int) -> list[Sequence]:
        """The first `count` waiting sequences in order, parked ones included."""
        entries = [entry for heap in (self._new, self._preempted) for entry in heap]
        entries += [(self._key(seq), seq) for parked in self._parked.values() for _, seq in parked]
        waiting = [entry for entry in entries if entry[1].status is Status.WAITING]
        return [seq for _, seq in nsmallest(count, waiting, key=lambda entry: entry[0])]

    def retry_after_s(self, now: float) -> float:
        """The mean time between recent pops in seconds, within 1 to 60: the time after which a new request probably finds room."""
        times = self._pop_times
        return min(60.0, max(1.0, (now - times[0]) / len(times))) if times else 1.0

    def postpone(self, seq: Sequence, delay_s: float) -> bool:
        """Move `seq`, which `peek` returned, to where it would be had it arrived `delay_s` later. False the second time."""
        if seq.is_postponed:
            return False
        heappop(self._heap(seq))
        seq.is_postponed = True
        seq.arrival_order += delay_s
        self._insert(seq)
        return True

    def park(self, seq: Sequence, producer: Sequence, num_blocks: int) -> None:
        """Skip `seq`, which `peek` returned, until `producer` has indexed `num_blocks` blocks or has left (`wake`)."""
        heappop(self._heap(seq))
        self._parked.setdefault(producer.seq_id, []).append((num_blocks, seq))

    def wake(self, producer: Sequence, num_blocks: float) -> bool:
        """Reinsert the sequences that are parked for at most `num_blocks` blocks of `producer`. True if there are any."""
        if not self._parked:
            return False
        parked = self._parked.pop(producer.seq_id, [])
        still_parked = [entry for entry in parked if entry[0] > num_blocks]
        if still_parked:
            self._parked[producer.seq_id] = still_parked
        for required, seq in parked:
            if required <= num_blocks:
                self._insert(seq)
        return len(still_parked) < len(parked)

    def forget(self, seq: Sequence) -> None:
        """Count a sequence that ended while it waited. Its entry is removed when it is first, or when half of all entries are obsolete."""
        self._count(seq, -1)
        self._num_ended += 1
        if self._num_ended > len(self) + 64:
            self._num_ended = 0
            for heap in (self._new, self._preempted):
                heap[:] = [entry for entry in heap if entry[1].status is Status.WAITING]
                heapify(heap)

    def _heap(self, seq: Sequence) -> list[tuple[Any, Sequence]]:
        """The heap that holds `seq`: that of new or that of preempted sequences."""
        return self._preempted if seq.num_preemptions else self._new

    def _insert(self, seq: Sequence) -> None:
        """Add a sequence to its heap, unless it has ended."""
        if seq.status is Status.WAITING:
            heappush(self._heap(seq), (self._key(seq), seq))

    def _count(self, seq: Sequence, change: int) -> None:
        """Change the number of new or preempted sequences, and of their tokens."""
        self.num_tokens += change * len(seq.tokens)
        if seq.num_preemptions:
            self.num_preempted += change
        else:
            self.num_new += change

    def _first(self, preempted_only: bool) -> list[tuple[Any, Sequence]]:
        """The heap whose first entry comes first, after removing ended sequences from the start of both."""
        if self._num_ended:
            for heap in (self._new, self._preempted):
                while heap and heap[0][1].status is not Status.WAITING:
                    heappop(heap)
        if preempted_only or not self._new:
            return self._preempted
        return min(self._new, self._preempted, key=lambda heap: heap[0][0]) if self._preempted else self._new
