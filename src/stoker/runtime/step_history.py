"""The newest steps of an executor: when each one ran, and which sequence computed how many tokens in it.

A ring buffer of preallocated lists, which is written once per step. In most steps the rows are those of the step before, and the list of
their sequence ids is shared. A reader makes records of them; the step loop does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import StepPlan

CAPACITY = 4096  # steps


class StepRecord(msgspec.Struct):
    """One step. Its duration starts at its launch or at the end of the previous step, and ends when its tokens are on the host.

    Rows 0 to num_decodes - 1 compute one token after a completed prefill; the next num_verifies rows also verify draft tokens; the others
    are chunks of prefills. `num_new` has the token counts of the rows from num_decodes on.
    """

    number: int  # from 0, since the start of the executor
    end_s: float  # monotonic
    duration_s: float
    tokens: int
    seq_ids: list[int]  # of each row; must not be changed
    num_decodes: int
    num_verifies: int
    num_new: list[int]

    @property
    def rows(self) -> int:
        """The number of sequences."""
        return len(self.seq_ids)

    @property
    def is_decode(self) -> bool:
        """Whether each row had one token."""
        return len(self.seq_ids) == self.tokens


class StepHistory:
    """The newest `CAPACITY` steps, and the number and the total duration of all steps."""

    __slots__ = (
        "_duration", "_durations", "_end", "_ends", "_ids", "_num_decodes", "_num_new", "_num_prefill_tokens", "_seq_ids", "_sequences",
        "num_steps", "started_s", "total_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.num_steps = 0
        self.total_s = 0.0
        self._end = self._duration = 0.0  # of the last step
        # Lists: a store to array.array takes 0.3 us in the step loop, and to a list 0.05 us.
        self._ends, self._durations = ([0.0] * CAPACITY for _ in range(2))
        self._num_decodes, self._num_prefill_tokens = ([0] * CAPACITY for _ in range(2))  # of steps with other rows
        self._seq_ids: list[list[int]] = [[]] * CAPACITY
        self._num_new: list[list[int]] = [[]] * CAPACITY  # of the rows from num_decodes on
        self._sequences: list[Sequence] = []  # of the last step
        self._ids: list[int] = []

    def end_step(self, launched_s: float) -> float:
        """Measure a step that was launched at the monotonic time `launched_s` and ends now. Returns its duration in seconds."""
        now = time.monotonic()
        self._duration = duration = now - (launched_s if launched_s > self._end else self._end)
        self._end = now
        self.total_s += duration
        return duration

    def record(self, plan: StepPlan) -> None:
        """Record the step that `end_step` measured last. Called after the commit, when the sequences are in the cache of the processor."""
        sequences = plan.sequences
        if sequences != self._sequences:  # compares identities
            self._sequences = sequences
            self._ids = [seq.seq_id for seq in sequences]
        slot = self.num_steps % CAPACITY
        self.num_steps += 1
        self._ends[slot] = self._end
        self._durations[slot] = self._duration
        self._seq_ids[slot] = self._ids
        if plan.num_decodes == len(sequences):
            self._num_new[slot] = _NO_ROWS
        else:
            if plan.parts:
                self._seq_ids[slot], num_new = _decodes_first(plan)
            else:
                num_new = plan.num_new
            self._num_new[slot] = num_new[plan.num_decodes :]
            self._num_decodes[slot] = plan.num_decodes
            self._num_prefill_tokens[slot] = plan.num_prefill_tokens

    def steps(self, first: int = 0) -> Iterator[StepRecord]:
        """The recorded steps from number `first` on, in order. The oldest ones are overwritten after `CAPACITY` steps."""
        for number in range(max(first, self.num_steps - CAPACITY, 0), self.num_steps):
            slot = number % CAPACITY
            seq_ids, num_new = self._seq_ids[slot], self._num_new[slot]
            num_decodes = self._num_decodes[slot] if num_new else len(seq_ids)
            yield StepRecord(
                number=number,
                end_s=self._ends[slot],
                duration_s=self._durations[slot],
                tokens=num_decodes + sum(num_new),
                seq_ids=seq_ids,
                num_decodes=num_decodes,
                num_verifies=len(num_new) - _num_prefills(num_new, self._num_prefill_tokens[slot]) if num_new else 0,
                num_new=num_new,
            )


_NO_ROWS: list[int] = []


def _num_prefills(num_new: list[int], num_prefill_tokens: int) -> int:
    """The number of prefill rows. They are the last rows of a step, and have `num_prefill_tokens` tokens together."""
    count = 0
    while num_prefill_tokens > 0:
        count += 1
        num_prefill_tokens -= num_new[-count]
    return count


def _decodes_first(plan: StepPlan) -> tuple[list[int], list[int]]:
    """(seq_ids, num_new) of the rows of a plan of several data-parallel ranks, decodes before prefills."""
    prefills = sorted(plan.prefill_rows)
    rows = sorted(range(len(plan)), key=set(prefills).__contains__)  # stable
    return [plan.sequences[row].seq_id for row in rows], [plan.num_new[row] for row in rows]
