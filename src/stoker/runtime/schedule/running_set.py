"""The running set: the sequences that hold blocks and a row of the device buffers."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from stoker.base.types import AdmissionRecord
from stoker.runtime.kv.manager import KVCacheManager, Match
from stoker.runtime.request import NO_ADAPTER, Sequence, Status
from stoker.runtime.schedule.policies.policy import Demand, Policy
from stoker.runtime.schedule.queue import WaitingQueue


class RunningSet:
    """Moves sequences between the states waiting, running, leaving and finished.

    A sequence is leaving if it ended or was preempted while a planned step contains it. It keeps its blocks and its row until the step is
    committed, so that no step writes to a block or a row that belongs to another sequence.
    """

    def __init__(self, kv_cache: KVCacheManager, policy: Policy, num_rows: int, first_row: int = 0) -> None:
        """`num_rows`: of the device buffers, from `first_row` on."""
        self.kv_cache = kv_cache
        self.policy = policy
        self.queue = WaitingQueue(policy.order)
        self.running: dict[int, Sequence] = {}  # by seq_id; the first ones are selected for the next step
        self.num_leaving = 0
        self.num_with_adapter = 0  # sequences with a row and an adapter
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.admission_blocked = False  # the first waiting sequence did not fit, and nothing was released since then
        self._free_rows = list(range(first_row, first_row + num_rows))  # a heap

    @property
    def num_holding(self) -> int:
        """The number of sequences that hold blocks: running and leaving ones."""
        return len(self.running) + self.num_leaving

    def num_missing_tokens(self, seq: Sequence) -> int | None:
        """The tokens of `seq` that would have to be computed. None if it could not be admitted after all waiting sequences now."""
        kv_cache, waiting = self.kv_cache, self.queue.first(len(self.queue))
        if len(waiting) >= len(self._free_rows):
            return None
        match, count = kv_cache.match(seq), kv_cache.num_blocks_for
        num_now = sum(count(len(other.tokens)) for other in waiting)
        num_later = sum(count(other.max_computed) for other in waiting) - num_now
        num_free, num_reserved = match.num_free - num_now, kv_cache.num_reserved + num_later
        if not self.policy.admits(Demand(match.num_blocks_now, match.num_blocks_later, num_free, num_reserved, self.num_holding)):
            return None
        num_shared = match.num_reused if match.producer is None else kv_cache.num_common_blocks(seq, match.producer)
        return len(seq.tokens) - num_shared * kv_cache.tokens_per_block

    @property
    def num_pending_tokens(self) -> int:
        """The tokens that must be computed before each sequence, waiting ones included, can sample its next token."""
        return self.queue.num_tokens + sum(max(seq.num_prefill - seq.num_computed, 0) for seq in self.running.values())

    @property
    def has_free_row(self) -> bool:
        """Whether a row of the device buffers is free."""
        return bool(self._free_rows)

    def enqueue(self, seq: Sequence) -> None:
        """Add a new or preempted sequence to the waiting queue."""
        seq.status = Status.WAITING
        self.queue.push(seq)
        self.admission_blocked = False

    def admit(self, seq: Sequence, match: Match, now: float) -> None:
        """Move the first waiting sequence to the running set, with the blocks of `match` and a row. `now` is in monotonic seconds."""
        self.queue.pop(seq, now)
        num_empty = self.kv_cache.pool.num_empty
        self.kv_cache.admit(seq, match)
        seq.status = Status.RUNNING
        seq.row = heappop(self._free_rows)
        self.running[seq.seq_id] = seq
        if seq.adapter != NO_ADAPTER:
            self.num_with_adapter += 1
        if not seq.num_preemptions:
            num_allocated = match.num_blocks_now
            seq.admission = AdmissionRecord(now - seq.arrival, match.num_reused, num_allocated, min(num_allocated, num_empty))
            seq.num_cached = seq.num_computed
            self.num_reused_tokens += seq.num_cached

    def end(self, seq: Sequence) -> None:
        """Finish a sequence that is waiting, running or leaving."""
        status, seq.status = seq.status, Status.FINISHED
        if status is Status.WAITING:
            self.queue.forget(seq)
            self.admission_blocked = False
        elif status is Status.RUNNING:
            self._leave(seq)

    def grow(self, seq: Sequence) -> bool:
        """Allocate one more block for a decode of `seq`, preempting others if necessary.

        False if `seq` must wait for a block, or was preempted itself.
        """
        while not self.kv_cache.grow(seq):
            victim = None if self.num_leaving else self.policy.victim(self.running.values())
            if victim is None:
                return False
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def release_unplanned(self, seq: Sequence) -> None:
        """Release the blocks and the row of a leaving sequence, unless a planned step contains it."""
        if seq.num_in_flight or seq.row < 0:
            return
        self.kv_cache.release(seq)
        heappush(self._free_rows, seq.row)
        seq.row = -1
        if seq.adapter != NO_ADAPTER:
            self.num_with_adapter -= 1
        self.num_leaving -= 1
        self.admission_blocked = False
        if seq.status is Status.LEAVING:
            seq.num_preemptions += 1
            self.enqueue(seq)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Index the blocks of the first `num_tokens` tokens, which are committed, and wake the sequences that are parked for them."""
        self.kv_cache.register(seq, num_tokens)
        self._wake(seq, seq.num_hashed)

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that rejected drafts occupied after the known tokens, unless a planned step contains the sequence."""
        if not seq.num_in_flight and self.kv_cache.trim(seq, len(seq.tokens)):
            self.admission_blocked = False

    def preempt(self, seq: Sequence) -> None:
        """Remove a sequence from the running set. It is queued again when no planned step contains it."""
        self.num_preemptions += 1
        seq.status = Status.LEAVING
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Remove a sequence from the running set, and release its blocks and row when no planned step contains it."""
        del self.running[seq.seq_id]
        self.kv_cache.retire(seq)
        self._wake(seq, math.inf)
        self.num_leaving += 1
        self.release_unplanned(seq)

    def _wake(self, producer: Sequence, num_blocks: float) -> None:
        """Requeue sequences that are parked until `producer` has indexed `num_blocks` blocks."""
        if self.queue.wake(producer, num_blocks):
            self.admission_blocked = False
