"""A picture of a running executor for people: its sequences, the blocks of each tier of the KV cache, and its newest steps.

The executor makes it on request only, between two steps. Everything in it is bounded, so that a request costs about as much as one step.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from stoker.base.logging import LogLine, recent_lines
from stoker.runtime.kv.tiers import TierOccupancy
from stoker.runtime.request import ExecutorStats, Sequence, Status
from stoker.runtime.step_history import StepHistory, StepRecord

if TYPE_CHECKING:
    from stoker.runtime.schedule.data_parallel import AnyScheduler

MAX_SEQUENCES = 256  # of each of the lists of running and waiting sequences
MAX_STEPS = 256
MAX_STEP_ROWS = 1 << 14  # of all steps together
MAX_ENDED = 1024  # names of ended sequences, for the newest steps
CELLS = 512  # of the map of a tier


class LiveQuery(msgspec.Struct, tag=True, array_like=True):
    """A request for a LiveState, which is answered with `Mailbox.reply_live`."""

    client: str
    number: int  # identifies the query of the client
    detail: bool = False  # include sequences and tiers
    first_step: int | None = None  # steps from this number on; None: no steps
    log_after_s: float | None = None  # lines of the log after this time, in seconds since 1970; None: no lines


class SequenceState(msgspec.Struct):
    """One sequence that is running or waiting."""

    seq_id: int
    request_id: str
    index: int  # which of the request's n sequences
    status: str  # waiting, running, leaving
    age_s: float  # since the request arrived
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were reused
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    priority: int


class LiveStep(msgspec.Struct, array_like=True):
    """One step, as StepRecord has it. `rows` is the index of its sequence ids in the list of row sets."""

    number: int
    end_s: float
    duration_s: float
    rows: int
    num_decodes: int
    num_verifies: int
    num_new: list[int]


class LiveState(msgspec.Struct):
    """The state of an executor at one moment.

    At most MAX_SEQUENCES running and waiting sequences, and the newest MAX_STEPS steps with at most MAX_STEP_ROWS rows together.
    """

    stats: ExecutorStats
    time_s: float  # monotonic time of the executor, as in the steps
    started_s: float  # monotonic time at which the executor began; steps and sequences are numbered since then
    running: list[SequenceState]
    waiting: list[SequenceState]
    tiers: list[TierOccupancy]
    steps: list[LiveStep]
    row_sets: list[list[int]]  # seq_ids of the rows of steps
    next_step: int  # number of the step after the newest one
    log: list[LogLine]
    names: dict[int, str]  # seq_id → "request id" or "request id [index]", for the sequences of the steps


class EndedSequences:
    """The names of the newest `MAX_ENDED` sequences that have ended."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, str]] = deque(maxlen=MAX_ENDED)

    def add(self, seq: Sequence) -> None:
        """Note the name of a sequence that has ended."""
        self._ended.append((seq.seq_id, name_of(seq)))

    def names(self) -> dict[int, str]:
        """seq_id → name."""
        return dict(self._ended)


def name_of(seq: Sequence) -> str:
    """The request id of a sequence, and its index if the request has several sequences."""
    name = client_request_id(seq.request_id)
    return f"{name} [{seq.index}]" if seq.params.n > 1 else name


def client_request_id(wire_id: str) -> str:
    """The request id that the frontend used. On the wire, the name of the frontend and a number precede it."""
    return wire_id.split(":", 2)[-1]


def live_state(
    stats: ExecutorStats,
    scheduler: AnyScheduler,
    preparing: list[Sequence],
    history: StepHistory,
    ended: EndedSequences,
    query: LiveQuery,
) -> LiveState:
    """The answer to `query`. `preparing` are sequences whose grammar is compiled."""
    now = time.monotonic()
    running = scheduler.running()
    waiting = [*scheduler.waiting(MAX_SEQUENCES), *preparing][:MAX_SEQUENCES] if query.detail else []
    oldest = history.num_steps if query.first_step is None else max(query.first_step, history.num_steps - MAX_STEPS)
    steps, row_sets = _share_rows(_newest(list(history.steps(oldest))))
    seq_ids = set(itertools.chain.from_iterable(row_sets))
    names = ended.names() if seq_ids else {}
    names |= {seq.seq_id: name_of(seq) for seq in running if seq.seq_id in seq_ids}
    return LiveState(
        stats=stats,
        time_s=now,
        started_s=history.started_s,
        running=_states(running[:MAX_SEQUENCES], now) if query.detail else [],
        waiting=_states(waiting, now),
        tiers=scheduler.occupancy(CELLS) if query.detail else [],
        steps=steps,
        row_sets=row_sets,
        next_step=history.num_steps,
        log=recent_lines(query.log_after_s) if query.log_after_s is not None else [],
        names={seq_id: names[seq_id] for seq_id in seq_ids if seq_id in names},
    )


def _newest(steps: list[StepRecord]) -> list[StepRecord]:
    """The newest of `steps` that have at most MAX_STEP_ROWS rows together."""
    num_rows = list(itertools.accumulate(step.rows for step in reversed(steps)))
    return steps[len(steps) - bisect_right(num_rows, MAX_STEP_ROWS) :]


def _share_rows(records: list[StepRecord]) -> tuple[list[LiveStep], list[list[int]]]:
    """The steps, and the lists of their sequence ids. Neighbours with the same list share it."""
    steps: list[LiveStep] = []
    row_sets: list[list[int]] = []
    for record in records:
        if not row_sets or row_sets[-1] is not record.seq_ids:
            row_sets.append(record.seq_ids)
        rows, num_decodes = len(row_sets) - 1, record.num_decodes
        steps.append(LiveStep(record.number, record.end_s, record.duration_s, rows, num_decodes, record.num_verifies, record.num_new))
    return steps, row_sets


def _states(sequences: Iterable[Sequence], now: float) -> list[SequenceState]:
    """The states of sequences at the monotonic time `now`."""
    return [
        SequenceState(
            seq_id=seq.seq_id,
            request_id=client_request_id(seq.request_id),
            index=seq.index,
            status=Status(seq.status).name.lower(),
            age_s=now - seq.arrival,
            prompt_tokens=seq.num_prompt,
            cached_tokens=seq.num_cached,
            computed_tokens=seq.num_computed,
            generated_tokens=seq.num_generated,
            max_tokens=seq.max_tokens,
            num_blocks=len(seq.blocks),
            num_preemptions=seq.num_preemptions,
            priority=seq.priority,
        )
        for seq in sequences
    ]
