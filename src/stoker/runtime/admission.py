"""Admission of requests: checks them, creates their sequences, and holds these while a grammar or a prompt is awaited."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from stoker.base.errors import QueueFullError, RequestError, UnavailableError
from stoker.base.types import FinishReason
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule.data_parallel import AnyScheduler

QUEUE_TIMEOUT_S = 30.0  # of a grammar in the queue of compilations


class SequenceHooks(Protocol):
    """The methods of a runner that are called when requests arrive and sequences begin and end."""

    def prepare(self, request: TokenRequest) -> Future[Any] | None:
        """Start to prepare the request outside the step loop. The future's result becomes `Sequence.grammar`; None: nothing to prepare."""

    def add(self, seq: Sequence) -> None:
        """Called before the first step of a sequence. Raises RequestError for a feature that the model does not support."""

    def remove(self, seq: Sequence) -> None:
        """Called when a sequence has ended, or when `add` raised an error for it."""


class Admission:
    """Checks requests and queues their sequences.

    Sequences that are being prepared count as waiting: for max_queue_size, cancellation and deadlines.
    """

    def __init__(
        self,
        runner: SequenceHooks,
        scheduler: AnyScheduler,
        max_queue_size: int,
        *,
        guide_timeout_s: float = 10.0,
        waits_for_ids: bool = False,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.max_queue_size = max_queue_size
        self.prepare_timeout_s = QUEUE_TIMEOUT_S + guide_timeout_s
        self.waits_for_ids = waits_for_ids  # set Sequence.waits_for_ids of every sequence
        self.on_begin: Callable[[Sequence], None] = lambda seq: None  # called before a sequence is queued
        self.on_prepared: Callable[[], None] = lambda: None  # called, from any thread, when a grammar is compiled or was refused
        self._seq_ids = itertools.count()
        # By request: the grammar, if it has a guide, the import of its prompt, if there is one, the start time, and its sequences.
        self._preparing: dict[str, tuple[Future[Any] | None, Future[None] | None, float, list[Sequence]]] = {}

    @property
    def num_preparing(self) -> int:
        """The number of sequences whose grammar is not compiled, or whose prompt is not imported yet."""
        return sum(len(sequences) for *_, sequences in self._preparing.values())

    def preparing(self) -> list[Sequence]:
        """The sequences whose grammar is not compiled, or whose prompt is not imported yet."""
        return [seq for *_, sequences in self._preparing.values() for seq in sequences]

    @property
    def num_waiting(self) -> int:
        """The number of sequences without blocks: those in the waiting queue and those being prepared."""
        return self.scheduler.num_waiting + self.num_preparing

    def request_ids(self) -> list[str]:
        """The ids of all requests that have not ended."""
        return [*self._preparing, *self.scheduler.request_ids()]

    def admit(self, request: TokenRequest, begin_import: Callable[[TokenRequest], Future[None] | None] = lambda request: None) -> None:
        """Queue the sequences of the request, now or when they are prepared. `begin_import` may start to read its prompt.

        Raises RequestError for a duplicate id or an unsupported request, and QueueFullError; the request leaves no state then.
        """
        if request.request_id in self.scheduler or request.request_id in self._preparing:
            raise RequestError("request_id", request.request_id, "a request with this id is in flight", cure="Use a unique id.")
        waiting, now = self.num_waiting, time.monotonic()
        if waiting >= self.max_queue_size:
            raise QueueFullError(waiting, self.max_queue_size, self.scheduler.retry_after_s(now))
        self.scheduler.check(request)
        future = self.runner.prepare(request)
        sequences = [Sequence(next(self._seq_ids), request, index, now) for index in range(request.params.n)]
        imported = begin_import(request)
        if future is None and imported is None:
            self._begin(sequences)
        else:
            self._preparing[request.request_id] = (future, imported, now, sequences)
            if future is not None:
                future.add_done_callback(lambda future: self.on_prepared())

    def advance(self) -> list[tuple[Sequence, Exception]]:
        """Queue the sequences whose preparation is complete.

        Returns (sequence, error) for those whose preparation failed or took too long.
        """
        failed: list[tuple[Sequence, Exception]] = []
        for request_id, (future, imported, since, sequences) in list(self._preparing.items()):
            if imported is not None and not imported.done():  # it ends by itself, after a failure as well
                continue
            if future is not None and not future.done() and time.monotonic() - since <= self.prepare_timeout_s:
                continue
            del self._preparing[request_id]
            try:
                self._begin_prepared(sequences, future)
            except Exception as error:
                failed += [(_end(seq, FinishReason.ERROR), error) for seq in sequences]
        return failed

    def cancel(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """End the sequences of a request, or only the one with `index`. Returns those that had not ended before."""
        return self._drop(request_id, index) + self.scheduler.cancel(request_id, index)

    def expire(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline is at or before `now` (monotonic seconds). Returns them."""
        ended = self.scheduler.expire(now)
        for request_id, (*_, sequences) in list(self._preparing.items()):
            if (deadline := sequences[0].deadline) is not None and deadline <= now:
                ended += self._drop(request_id, None, FinishReason.DEADLINE)
        return ended

    def _begin_prepared(self, sequences: list[Sequence], future: Future[Any] | None) -> None:
        """Queue sequences with the grammar in `future`. Raises UnavailableError if it is not complete: the time-out has passed."""
        if future is not None and not future.done():
            future.cancel()
            raise UnavailableError(
                f"the grammar waited {self.prepare_timeout_s:.0f} s, mostly for the compilation of others.", cure="Retry later."
            )
        for seq in sequences:
            seq.grammar = future.result() if future is not None else None
        self._begin(sequences)

    def _begin(self, sequences: list[Sequence]) -> None:
        """Report the sequences to the runner and queue them. After an error all of them are removed again, and the error is raised."""
        added: list[Sequence] = []
        try:
            for seq in sequences:
                added.append(seq)
                self.runner.add(seq)
        except BaseException:
            for seq in added:
                self.runner.remove(seq)
            raise
        for seq in sequences:
            seq.waits_for_ids = seq.waits_for_ids or self.waits_for_ids
            self.on_begin(seq)
            self.scheduler.add(seq)

    def _drop(self, request_id: str, index: int | None, reason: FinishReason = FinishReason.CANCELLED) -> list[Sequence]:
        """End sequences of a request that is being prepared. Returns those that were ended."""
        if request_id not in self._preparing:
            return []
        future, imported, _, sequences = self._preparing[request_id]
        dropped = [seq for seq in sequences if index is None or seq.index == index]
        for seq in dropped:
            sequences.remove(_end(seq, reason))
        if not sequences:
            for each in (future, imported):
                if each is not None:
                    each.cancel()
            del self._preparing[request_id]
        return dropped


def _end(seq: Sequence, reason: FinishReason) -> Sequence:
    """Mark a sequence as finished for `reason`, and return it."""
    seq.status, seq.finish_reason = Status.FINISHED, reason
    return seq
