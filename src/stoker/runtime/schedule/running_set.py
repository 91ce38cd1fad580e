"""Who holds blocks and a row: how sequences get them, and how they give them up."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from stoker.runtime.kv.manager import KVCacheManager, Match
from stoker.runtime.request import Sequence, Status
from stoker.runtime.schedule.policies.policy import Policy
from stoker.runtime.schedule.queue import WaitingQueue


class RunningSet:
    """Moves sequences between waiting, running, leaving and gone.

    Leaving are those that ended or were preempted while a planned step still contains them. They keep their blocks and
    row until it is committed, so no step ever writes to what another sequence owns.
    """

    def __init__(self, kv_cache: KVCacheManager, policy: Policy, num_rows: int) -> None:
        self.kv_cache = kv_cache
        self.policy = policy
        self.queue = WaitingQueue(policy.order)
        self.running: dict[int, Sequence] = {}  # by seq_id, in the order of their turns
        self.num_leaving = 0
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.stuck = False  # the next one can't be admitted until something changes here
        self._free_rows = list(range(num_rows))  # a heap

    @property
    def num_holding(self) -> int:
        return len(self.running) + self.num_leaving

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def enqueue(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.queue.push(seq)
        self.stuck = False

    def admit(self, seq: Sequence, match: Match, now: float) -> None:
        self.queue.pop(seq, now)
        self.kv_cache.admit(seq, match)
        seq.status = Status.RUNNING
        seq.row = heappop(self._free_rows)
        self.running[seq.seq_id] = seq
        if not seq.num_preemptions:
            seq.num_cached = seq.num_computed
            self.num_reused_tokens += seq.num_cached

    def end(self, seq: Sequence) -> None:
        """`seq` ended, wherever it was."""
        status, seq.status = seq.status, Status.FINISHED
        if status is Status.WAITING:
            self.queue.forget(seq)
            self.stuck = False
        elif status is Status.RUNNING:
            self._leave(seq)

    def grow(self, seq: Sequence) -> bool:
        """A further block for a decode; False when it must wait for one, or was itself given up."""
        while not self.kv_cache.grow(seq):
            victim = None if self.num_leaving else self.policy.victim(self.running.values())
            if victim is None:
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def settle(self, seq: Sequence) -> None:
        """Release what a sequence that doesn't run any more holds, unless a planned step contains it."""
        if seq.num_in_flight or seq.row < 0:
            return
        self.kv_cache.release(seq)
        heappush(self._free_rows, seq.row)
        seq.row = -1
        self.num_leaving -= 1
        self.stuck = False
        if seq.status is Status.LEAVING:
            seq.num_preemptions += 1
            self.enqueue(seq)

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Its first `num_tokens` tokens are computed and committed: index their blocks, and let those that waited for them look again."""
        self.kv_cache.register(seq, num_tokens)
        self._wake(seq, seq.num_hashed)

    def trim(self, seq: Sequence) -> None:
        """Release the blocks after those of its known tokens, which rejected drafts took, unless a planned step contains it."""
        if not seq.num_in_flight and self.kv_cache.trim(seq, len(seq.tokens)):
            self.stuck = False

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        seq.status = Status.LEAVING
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        self.kv_cache.retire(seq)
        self._wake(seq, math.inf)
        self.num_leaving += 1
        self.settle(seq)

    def _wake(self, leader: Sequence, num_blocks: float) -> None:
        if self.queue.wake(leader, num_blocks):
            self.stuck = False
