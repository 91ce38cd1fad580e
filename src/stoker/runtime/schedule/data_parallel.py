"""The scheduler of data-parallel ranks: one scheduler for each rank, and a common waiting queue.

A sequence is placed on a rank when that rank can admit it, so that no sequence waits at one rank while another has room. It stays there:
its keys and values are in the cache of this rank only. Of the ranks with room, the one with the lowest cost is chosen:

    prompt tokens of the sequence that its prefix index lacks + prompt tokens that it has yet to compute + SEQUENCE_COST × its sequences

A step lasts as long as that of the slowest rank, so that prefixes count less than the balance of the ranks: a common system prompt is
computed once on each rank, and the next turn of a long conversation goes to the rank that has its history.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from stoker.base.types import FinishReason
from stoker.runtime.kv.tiers import TierOccupancy
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule.plan import StepOutcome, StepPlan
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.queue import WaitingQueue
from stoker.runtime.schedule.scheduler import BlockCounts, Scheduler


class DataParallelScheduler:
    """Plans the steps of `num_ranks` ranks. It has the interface of `Scheduler`.

    `make_rank(first_row)` creates the scheduler of a rank whose rows of the device buffers begin at `first_row`; each has `rows_per_rank`.
    Block ids of `pop_poisoned` are rank × blocks per rank + the id within the rank.
    """

    event_log = None

    def __init__(self, make_rank: Callable[[int], Scheduler], num_ranks: int, rows_per_rank: int, policy: str) -> None:
        self.ranks = [make_rank(rank * rows_per_rank) for rank in range(num_ranks)]
        self.budget, self.draft_length = self.ranks[0].budget, self.ranks[0].draft_length
        self._queue = WaitingQueue(POLICIES.get(policy)().order)
        self._unplaced: dict[str, list[Sequence]] = {}  # sequences of the queue, by request
        self._paused = False
        self._next_deadline = math.inf  # of the queue
        self._blocked_at: object = None  # the state of the ranks when the first sequence of the queue fitted on none

    # State.

    @property
    def num_waiting(self) -> int:
        """The number of sequences that have never held blocks."""
        return self._queue.num_new + sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_preempted(self) -> int:
        """The number of preempted sequences that wait to be admitted again."""
        return sum(rank.num_preempted for rank in self.ranks)

    @property
    def num_running(self) -> int:
        """The number of sequences that hold blocks."""
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions since the start."""
        return sum(rank.num_preemptions for rank in self.ranks)

    @property
    def num_reused_tokens(self) -> int:
        """The number of prompt tokens that were reused from the cache since the start."""
        return sum(rank.num_reused_tokens for rank in self.ranks)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan or to commit. New sequences do not count while admission is paused."""
        return any(rank.has_work for rank in self.ranks) or (self._queue.num_new > 0 and not self._paused)

    @property
    def blocks(self) -> BlockCounts:
        """The blocks of all ranks."""
        counts = [rank.blocks for rank in self.ranks]
        return BlockCounts(*(sum(values) for values in zip(*counts, strict=True)))

    @property
    def tokens_per_block(self) -> int:
        """The number of tokens of a block."""
        return self.ranks[0].tokens_per_block

    def occupancy(self, num_cells: int) -> list[TierOccupancy]:
        """What the blocks of each rank hold, in at most `num_cells` cells together."""
        found = []
        for number, rank in enumerate(self.ranks):
            for tier in rank.occupancy(max(num_cells // len(self.ranks), 1)):
                tier.name = f"{tier.name} of rank {number}"
                found.append(tier)
        return found

    def running(self) -> list[Sequence]:
        """The running sequences, rank after rank."""
        return [seq for rank in self.ranks for seq in rank.running()]

    def waiting(self, count: int) -> list[Sequence]:
        """The first `count` waiting sequences: those that are placed on a rank, then the others."""
        return [*(seq for rank in self.ranks for seq in rank.waiting(count)), *self._queue.first(count)][:count]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unplaced or any(request_id in rank for rank in self.ranks)

    def request_ids(self) -> list[str]:
        """The ids of requests with a sequence that has not ended."""
        return list(dict.fromkeys([*self._unplaced, *(name for rank in self.ranks for name in rank.request_ids())]))

    def retry_after_s(self, now: float) -> float:
        """The seconds after which the queue probably has room."""
        return self._queue.retry_after_s(now)

    def check(self, request: TokenRequest) -> None:
        """Raise RequestError for a request that can never run on a rank."""
        self.ranks[0].check(request)

    # Sequences.

    def add(self, seq: Sequence) -> None:
        """Queue a sequence whose request passed `check`."""
        self.ranks[0].limit(seq)
        self._unplaced.setdefault(seq.request_id, []).append(seq)
        seq.status = Status.WAITING
        self._queue.push(seq)
        if seq.deadline is not None:
            self._next_deadline = min(self._next_deadline, seq.deadline)
        self._blocked_at = None

    def cancel(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """End the sequences of a request, or only the one with `index`. Returns those that had not ended before."""
        ended = [seq for seq in self._unplaced.get(request_id, ()) if index is None or seq.index == index]
        for seq in ended:
            self.end(seq, FinishReason.CANCELLED)
        return [*(seq for rank in self.ranks for seq in rank.cancel(request_id, index)), *ended]

    def expire(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline is at or before `now`, and return them."""
        ended: list[Sequence] = []
        if now >= self._next_deadline:
            timed = [(seq.deadline, seq) for group in self._unplaced.values() for seq in group if seq.deadline is not None]
            ended = [seq for deadline, seq in timed if deadline <= now]
            self._next_deadline = min((deadline for deadline, _ in timed if deadline > now), default=math.inf)
        for seq in ended:
            self.end(seq, FinishReason.DEADLINE)
        return [*(seq for rank in self.ranks for seq in rank.expire(now)), *ended]

    def end(self, seq: Sequence, reason: FinishReason, stop_id: int | None = None) -> None:
        """End a waiting or running sequence, unless it has ended."""
        if seq.rank >= 0:
            self.ranks[seq.rank].end(seq, reason, stop_id)
        elif seq.status is not Status.FINISHED:
            self._remove(seq)
            seq.status, seq.finish_reason, seq.stop_id = Status.FINISHED, reason, stop_id
            self._queue.forget(seq)
            self._blocked_at = None

    def pause(self, paused: bool) -> None:
        """Stop or resume admitting new sequences. Running and preempted sequences continue."""
        self._paused = paused
        for rank in self.ranks:
            rank.pause(paused)

    def poison(self, seq: Sequence) -> None:
        """Mark the blocks of a sequence, which may contain NaN."""
        self.ranks[seq.rank].poison(seq)

    def pop_poisoned(self) -> list[int]:
        """Poisoned blocks of all ranks that have become free since the last call."""
        per_rank = self.ranks[0].blocks.total
        return [number * per_rank + block for number, rank in enumerate(self.ranks) for block in rank.pop_poisoned()]

    # Steps.

    def plan(self, now: float) -> StepPlan:
        """Plan the next step of all ranks. Ranks without work have a part without rows. Without any row, the plan has no parts."""
        if not self._paused:
            self._place(now)
        parts = [rank.plan(now) for rank in self.ranks]
        return StepPlan.joined(parts) if any(part.sequences for part in parts) else StepPlan()

    def commit(self, plan: StepPlan, token_ids: Seq[list[int]]) -> StepOutcome:
        """Append the ids that each row of the step yielded to its sequence."""
        if len(token_ids) != len(plan):
            raise ValueError(f"token ids of {len(token_ids)} rows for a step of {len(plan)} rows")
        outcome, first = StepOutcome(), 0
        for rank, part in zip(self.ranks, plan.parts, strict=True):
            if part.sequences:
                found = rank.commit(part, token_ids[first : first + len(part)])
                outcome.sequences += found.sequences
                outcome.token_ids += found.token_ids
                outcome.finished += found.finished
            first += len(part)
        return outcome

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """End the sequences of a step that raised an error. Returns those that had not ended before."""
        parts = zip(self.ranks, plan.parts, strict=True)
        return [seq for rank, part in parts if part.sequences for seq in rank.fail(part)]

    def record_time(self, plan: StepPlan, duration_s: float) -> None:
        """Measure a step. Only the part with the most tokens can have determined its duration."""
        rank, part = max(zip(self.ranks, plan.parts, strict=True), key=lambda pair: pair[1].num_tokens)
        rank.record_time(part, duration_s)

    def _place(self, now: float) -> None:
        """Move sequences from the queue to ranks that can admit them, in order, until one fits on no rank."""
        while (seq := self._queue.peek()) is not None:
            state = (seq.seq_id, [rank.room for rank in self.ranks])
            if state == self._blocked_at:
                return
            costs = [rank.placement_cost(seq) for rank in self.ranks]
            if all(cost is None for cost in costs):
                self._blocked_at = state
                return
            best = min(range(len(costs)), key=lambda number: math.inf if (cost := costs[number]) is None else cost)
            self._queue.pop(seq, now)
            self._remove(seq)
            seq.rank = best
            self.ranks[best].add(seq)

    def _remove(self, seq: Sequence) -> None:
        """Remove a sequence from those that are not placed."""
        group = self._unplaced[seq.request_id]
        group.remove(seq)
        if not group:
            del self._unplaced[seq.request_id]


AnyScheduler = Scheduler | DataParallelScheduler
