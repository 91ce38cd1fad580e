"""The executor: the step loop of one engine. Receive messages → plan → launch → commit → send outputs."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import msgspec
import torch

from stoker.base.config import RuntimeConfig
from stoker.base.errors import GuideCostError, RankError, RequestError, StokerError, UnavailableError
from stoker.base.logging import get_logger
from stoker.base.profile_query import BUSY, ProfileQuery, ProfileResult
from stoker.base.types import FinishReason, PrefillChunk
from stoker.runtime.admission import Admission, SequenceHooks
from stoker.runtime.client import Cancel, ExecutorInfo, Mailbox, Message, Pause, Shutdown, StatsQuery, Submit
from stoker.runtime.kv.events.publisher import EventPublisher
from stoker.runtime.live_state import EndedSequences, LiveQuery, live_state
from stoker.runtime.request import ErrorInfo, ExecutorStats, Sequence, SequenceOutput, TokenRequest
from stoker.runtime.schedule.data_parallel import AnyScheduler
from stoker.runtime.schedule.plan import StepOutcome, StepPlan
from stoker.runtime.step_history import StepHistory
from stoker.runtime.step_profiler import StepProfiler
from stoker.runtime.transfer.transfers import Transfers
from stoker.runtime.watchdog import Watchdog
from stoker.runtime.worker.step_handle import StepResult

log = get_logger(__name__)

_NO_TOKEN = ErrorInfo("bad_logits", "no token can be sampled: the logits are not finite, or every token is banned.")
_IDLE_POLL_S = 0.5  # an idle loop wakes at this interval for heartbeats and deadlines
_PREPARING_POLL_S = 0.05  # the same while other threads work for it, which wake it: for deadlines, and leases of blocks


class Runner(SequenceHooks, Protocol):
    """The interface of the device side. Tests and benchmarks of the executor use a stub of it."""

    def launch(self, plan: StepPlan) -> Handle:
        """Start the step of a plan and return at once."""

    def zero_blocks(self, blocks: list[int]) -> None:
        """Fill the keys and values of KV cache blocks with zeros."""

    @property
    def capture_is_due(self) -> bool:
        """Whether steps have lost as much without a graph of their size as its capture costs."""

    def capture_next(self) -> bool:
        """Perform a part of the capture of a further step as a CUDA graph, which takes less than 0.1 s. False if none is left.

        Raises RankError.
        """

    def close(self) -> None:
        """End the processes that `prepare` started. May be called repeatedly."""


class Handle(Protocol):
    """A launched step. `wait` blocks until its results are on the host."""

    def wait(self) -> StepResult:
        """Block until the step has ended, and return its results. Raises the error of the step."""


class FollowerRanks(Protocol):
    """The follower processes. `check` and, after an error of a step, `check_after_error` raise RankError if one of them has failed."""

    num_stages: int
    local_ranks: list[int]  # of this host, the leader first

    def publish_profile(self, number: int, *, start: bool) -> None:
        """Make the followers start or stop profile `number`."""

    def check(self) -> None:
        """Raise RankError if a follower process has ended."""

    def check_after_error(self) -> None:
        """Wait shortly for a failed follower to report. Raise RankError if one has failed."""

    def close(self, failure: str = "") -> None:
        """End the follower processes, because of a failure if it is not empty."""


class Executor:
    """The step loop of one engine, in one thread. With overlap, a step is planned and launched while the previous one runs.

    With pipeline stages, as many steps as there are stages are in flight.
    """

    def __init__(
        self, runner: Runner, scheduler: AnyScheduler, mailbox: Mailbox, info: ExecutorInfo, config: RuntimeConfig,
        ranks: FollowerRanks | None = None, events: EventPublisher | None = None, transfers: Transfers | None = None,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.scheduler = scheduler
        self.mailbox = mailbox
        self.info = info
        self.config = config
        self.stats = ExecutorStats(
            num_blocks=scheduler.blocks.total,
            tokens_per_block=scheduler.tokens_per_block,
            max_batch_size=(config.max_batch_size or info.limits.max_batch_size) * info.data_parallel,
        )
        self._ranks = ranks
        self._events = events
        self._transfers = transfers
        self._num_stages = ranks.num_stages if ranks is not None else 1
        overlapped = 2 if config.overlap and info.device != "cpu" else 1
        self._depth = self._num_stages if self._num_stages > 1 else overlapped
        # A sequence is in one stage at a time, because the first stage needs the token that the last one samples.
        self.admission = Admission(
            runner, scheduler, config.max_queue_size, guide_timeout_s=config.guide_timeout_s, waits_for_ids=self._num_stages > 1
        )
        self.admission.on_prepared = mailbox.wake
        if transfers is not None:
            self.admission.on_begin = transfers.begin_export
            transfers.wake_with(mailbox.wake)
        self.watchdog = Watchdog(info.step_timeout_s)
        self.step_history = StepHistory()
        self.ended = EndedSequences()
        self._in_flight: deque[tuple[StepPlan, Handle, float]] = deque()
        self._outputs: list[SequenceOutput] = []
        self._announced: set[int] = set()  # seq_ids whose first output, which has cached_tokens and admission, was queued
        self._shutdown: Shutdown | None = None
        self._profile: StepProfiler | None = None
        self._num_profiles = 0

    def run(self, *, capture_when_idle: bool = False) -> None:
        """Loop until shut down. An error of the loop itself is logged, sent to every client, and raised.

        `capture_when_idle`: capture further steps while there are no requests. No other thread of the process may synchronize the device
        then, which would fail; those of transfers wait for events and streams of their own, which is allowed.
        """
        reason, failure = "the executor stopped", ""
        self.watchdog.start()
        try:
            while self._shutdown is None or (self._shutdown.drain and (self.scheduler.has_work or self._is_preparing)):
                captures = capture_when_idle and not self.is_busy and self._profile is None
                self.turn(0.0 if captures else _IDLE_POLL_S)
                if captures and not self.is_busy and self._shutdown is None:
                    capture_when_idle = self.capture_next()
        except BaseException as error:
            failure = str(error) or repr(error)
            reason = f"the executor failed: {error!r}"
            log.exception("the step loop failed")
            raise
        finally:
            self.watchdog.stop()
            self.mailbox.close(reason)
            self.close(failure)

    def close(self, failure: str = "") -> None:
        """End the processes of the runner and of the follower ranks, and the threads that publish block events.

        `failure`: the error of the step loop, which other nodes then log as the reason of their end.
        """
        self.runner.close()
        if self._transfers is not None:
            self._transfers.close()
        if self._profile is not None:
            self._profile.discard()
        if self._events is not None:
            self._events.close()
        if self._ranks is not None:
            self._ranks.close(failure)

    @property
    def is_busy(self) -> bool:
        """Whether a sequence is waiting, running or being prepared."""
        return bool(self._in_flight) or self.scheduler.has_work or self._is_preparing

    @property
    def _is_preparing(self) -> bool:
        """Whether other threads or processes work for sequences of this executor, or read its blocks."""
        return bool(self.admission.num_preparing) or (self._transfers is not None and self._transfers.is_busy)

    def capture_next(self) -> bool:
        """Perform a part of the capture of a further step, between two turns. False if all steps are captured. Raises RankError."""
        with self.watchdog.step(lambda: "a step is captured as a CUDA graph"):
            return self.runner.capture_next()

    def capture_all(self) -> None:
        """Capture all steps, so that none of a measurement is captured or padded to a larger one. Raises RankError."""
        while self.capture_next():
            pass

    def turn(self, timeout_s: float) -> None:
        """One iteration of the loop: receive messages, launch at most one step, and commit at most one.

        Waits at most `timeout_s` for a message when idle. Raises RankError.
        """
        if self._profile is None:
            self._turn(timeout_s)
            return
        with torch.profiler.record_function(f"after {self.step_history.num_steps} steps"):
            self._turn(timeout_s)
        self._advance_profile(self._profile)

    def _turn(self, timeout_s: float) -> None:
        """`turn` without a profile."""
        if self._ranks is not None:
            self._ranks.check()
        busy = bool(self._in_flight) or self.scheduler.has_work
        idle_s = min(timeout_s, _PREPARING_POLL_S) if self._is_preparing else timeout_s
        for message in self.mailbox.poll(0.0 if busy else idle_s):
            self._receive(message)
        if self.runner.capture_is_due and self.scheduler.has_work:
            self._capture_between_steps()
        now = time.monotonic()
        if self._transfers is not None:
            self._transfers.advance(self._zero_poisoned_blocks)
        for seq, error in self.admission.advance():
            self.stats.num_costly_guides += isinstance(error, GuideCostError)
            self._finish(seq, _info(error))
        for seq in self.admission.expire(now):
            self._finish(seq)
        self._launch(now)
        if self._in_flight and (len(self._in_flight) >= self._depth or not self._launched):
            self._commit()
        self._send()
        if self._events is not None and (changes := self.scheduler.event_log) is not None:
            self._events.publish(changes.pop())
        self.stats.heartbeat_s = time.monotonic()

    def _send(self) -> None:
        """Send the outputs that are queued."""
        if self._outputs:
            self.mailbox.send(self._outputs)
            self._outputs = []

    # Messages.

    def _receive(self, message: Message) -> None:
        """Handle one message from a client."""
        match message:
            case Submit(request=request):
                self._submit(request)
            case Cancel(request_id=request_id, index=index):
                for seq in self.admission.cancel(request_id, index):
                    self._finish(seq)
            case Pause(paused=paused):
                self.scheduler.pause(paused)
            case StatsQuery():
                self.mailbox.reply_stats(message, self.snapshot())
            case LiveQuery():
                preparing = self.admission.preparing()
                state = live_state(self.snapshot(), self.scheduler, preparing, self.step_history, self.ended, message)
                self.mailbox.reply_live(message, state)
            case ProfileQuery():
                self._start_profile(message)
            case Shutdown():
                self._shutdown = message
                if not message.drain:
                    self._cancel_all()

    def _start_profile(self, query: ProfileQuery) -> None:
        """Profile the next steps of all ranks, unless a profile is recorded or written already."""
        if self._profile is not None:
            self.mailbox.reply_profile(query, ProfileResult(error=BUSY))
            return
        self._num_profiles += 1
        ranks = self._ranks.local_ranks if self._ranks is not None else [0]
        try:
            self._profile = StepProfiler(query, self._num_profiles, ranks, self.info.device, self.step_history.num_steps)
        except (OSError, RuntimeError) as error:
            self.mailbox.reply_profile(query, ProfileResult(error=f"it cannot be started: {error}"))
            return
        if self._ranks is not None:
            self._ranks.publish_profile(self._num_profiles, start=True)

    def _advance_profile(self, profile: StepProfiler) -> None:
        """End the profile when it is over, and send its result when it is written."""
        num_steps = self.step_history.num_steps
        if profile.is_recording and profile.is_over(num_steps):
            if self._ranks is not None:
                self._ranks.publish_profile(profile.number, start=False)
            profile.stop(num_steps)
        elif profile.result is not None:
            self._profile = None  # before the reply, so that a client that has it can start the next profile
            self.mailbox.reply_profile(profile.query, profile.result)

    def _submit(self, request: TokenRequest) -> None:
        """Admit a request. If that raises an error, it becomes the output of each of the request's sequences."""
        try:
            if self._shutdown is not None:
                raise UnavailableError("the server is draining.", cure="Send the request to another replica.")
            if self._transfers is None:
                self.admission.admit(request)
            else:
                self.admission.admit(request, self._transfers.begin_import)
        except Exception as error:
            if self._transfers is not None:
                self._transfers.refuse(request)
            self.stats.num_failed += 1
            info = _info(error)
            self._outputs += [
                SequenceOutput(request.request_id, index, [], FinishReason.ERROR, error=info) for index in range(request.params.n)
            ]

    def _cancel_all(self) -> None:
        """End all sequences with finish_reason CANCELLED."""
        for request_id in self.admission.request_ids():
            for seq in self.admission.cancel(request_id):
                self._finish(seq)

    # Steps.

    _launched = False

    def _capture_between_steps(self) -> None:
        """Perform a part of a capture while no step is in flight, so that no step's time contains it. Raises RankError."""
        while self._in_flight:
            self._commit()
        self._send()
        try:
            self.capture_next()
        except Exception as error:
            self._raise_rank_error(error)
            raise

    def _launch(self, now: float) -> None:
        """Plan a step, and launch it if it has rows."""
        self._launched = False
        plan = self.scheduler.plan(now)
        self._zero_poisoned_blocks()
        if not plan.sequences:
            return
        started = time.monotonic()
        try:
            with self.watchdog.step(lambda: self._describe(plan)):
                handle = self.runner.launch(plan)
        except Exception as error:
            self._raise_rank_error(error)
            while self._in_flight:  # plans are committed in order
                self._commit()
            self._fail(plan, error)
            return
        self._launched = True
        self._in_flight.append((plan, handle, started))
        if self._transfers is not None:
            self._transfers.on_launch(plan)
        self._count(plan)

    def _commit(self) -> None:
        """Wait for the oldest step in flight and commit its results. An error of the step ends its sequences only."""
        plan, handle, launched = self._in_flight.popleft()
        try:
            with self.watchdog.step(lambda: self._describe(plan)):
                result = handle.wait()
        except Exception as error:
            self._fail(plan, error)
            return
        self.stats.last_step_time_s = self.step_history.end_step(launched)
        self.scheduler.record_time(plan, self.stats.last_step_time_s)
        if plan.num_prefill_tokens:
            self._record_chunks(plan, launched)
        if result.drafts:
            for seq, drafts in zip(result.sequences, result.drafts, strict=True):
                seq.proposal = drafts
        tokens = self._tokens(plan, result)
        if self._transfers is not None:
            self._transfers.on_commit(plan)
        outcome = self.scheduler.commit(plan, tokens)
        self._emit(outcome, result)
        self.step_history.record(plan)
        for seq in outcome.finished:
            self._forget(seq)

    def _record_chunks(self, plan: StepPlan, launched: float) -> None:
        """Note the step, which ends now, in the traced sequences whose prompt it computed."""
        for row in plan.prefill_rows:
            seq = plan.sequences[row]
            if seq.request.traced and seq.seq_id not in self._announced:
                seq.prefill_chunks = [*seq.prefill_chunks, PrefillChunk(launched, time.monotonic(), plan.num_new[row])]

    def _tokens(self, plan: StepPlan, result: StepResult) -> list[list[int]]:
        """The token ids that each row of the plan yielded. Ends sequences for which no token could be sampled (NaN logits)."""
        sampled = iter(result.token_ids)
        token_ids = result.token_ids if all(plan.samples) else [next(sampled) if samples else [] for samples in plan.samples]
        for seq, ids in zip(plan.sequences, token_ids, strict=True):
            if ids and ids[-1] < 0 and seq.finish_reason is None:
                self.scheduler.poison(seq)
                self.scheduler.end(seq, FinishReason.ERROR)
                self._finish(seq, seq.fault or _NO_TOKEN)
        return token_ids

    def _emit(self, outcome: StepOutcome, result: StepResult) -> None:
        """Queue one output for each sequence with new tokens."""
        outputs, announced = self._outputs, self._announced
        scores = dict(zip((seq.seq_id for seq in result.sequences), result.logprobs, strict=True)) if result.logprobs else {}
        for seq, ids in zip(outcome.sequences, outcome.token_ids, strict=True):
            output = SequenceOutput(seq.request_id, seq.index, ids, seq.finish_reason, seq.stop_id)
            if seq.seq_id not in announced:
                announced.add(seq.seq_id)
                output.cached_tokens = seq.num_cached
                output.admission = seq.admission
                output.prefill_chunks = seq.prefill_chunks
                output.prompt_logprobs = result.prompt_logprobs.get(seq.seq_id)
            if scores and (score := scores.get(seq.seq_id)) is not None:
                output.logprobs = score[: len(ids)]
            if (drafts := seq.acceptance) is not None:
                output.num_drafts, output.num_accepted = drafts.num_drafts, drafts.num_accepted
            outputs.append(output)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """End the sequences of the oldest step, which raised `error`; other sequences continue. Raises RankError if a rank failed."""
        self._raise_rank_error(error)
        log.error("a step of %d rows failed: %r", len(plan), error, exc_info=error)
        for seq in self.scheduler.fail(plan):
            self._finish(seq, ErrorInfo("step_failed", f"the step failed: {error}"))

    def _raise_rank_error(self, error: Exception) -> None:
        """Raise RankError if the failure of a rank, this one or a follower, is the cause of a step's error."""
        if self._ranks is not None:
            self._ranks.check_after_error()
        if isinstance(error, RankError):
            raise error

    def _zero_poisoned_blocks(self) -> None:
        """Zero released blocks that may contain NaN, because attention multiplies masked values by zero.

        Called after plan(), which may have allocated blocks that were released before to other sequences, and before transfers allocate.
        """
        if blocks := self.scheduler.pop_poisoned():
            self.runner.zero_blocks(blocks)

    # Ended sequences.

    def _finish(self, seq: Sequence, error: ErrorInfo | None = None) -> None:
        """Queue the last output of a sequence that ended without a new token."""
        self._outputs.append(SequenceOutput(seq.request_id, seq.index, [], seq.finish_reason, error=error))
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        """Remove the state of an ended sequence, and count it."""
        self.runner.remove(seq)
        if self._transfers is not None:
            self._transfers.on_end(seq)
        self._announced.discard(seq.seq_id)
        self.ended.add(seq)
        match seq.finish_reason:
            case FinishReason.CANCELLED | FinishReason.DEADLINE:
                self.stats.num_cancelled += 1
            case FinishReason.ERROR:
                self.stats.num_failed += 1
            case _:
                self.stats.num_finished += 1

    # Statistics.

    def _count(self, plan: StepPlan) -> None:
        """Add a committed step to the statistics."""
        stats = self.stats
        stats.num_steps += 1
        stats.row_steps += len(plan)
        stats.last_step_rows = len(plan)
        stats.last_step_tokens = plan.num_tokens
        stats.last_step_prefill_tokens = plan.num_prefill_tokens
        stats.num_decode_tokens += plan.num_tokens - plan.num_prefill_tokens
        stats.num_prefill_tokens += plan.num_prefill_tokens

    def snapshot(self) -> ExecutorStats:
        """A copy of the current statistics."""
        scheduler, stats = self.scheduler, self.stats
        stats.num_waiting = self.admission.num_waiting
        stats.num_running = scheduler.num_running
        stats.num_paused = scheduler.num_preempted
        _, stats.num_free_blocks, stats.num_cached_blocks = scheduler.blocks
        stats.num_reused_tokens = scheduler.num_reused_tokens
        stats.busy_time_s = self.step_history.total_s
        stats.num_preemptions = scheduler.num_preemptions
        stats.token_limit = scheduler.budget.limit
        if self._transfers is not None:
            self._transfers.count(stats)
        drafts = scheduler.draft_length
        stats.num_draft_steps, stats.num_draft_tokens = drafts.num_steps, drafts.num_drafts
        stats.num_accepted_draft_tokens = drafts.num_accepted
        return msgspec.structs.replace(stats)

    def _describe(self, plan: StepPlan) -> str:
        """A text about a step and the state of the scheduler, for the log."""
        lines = [
            f"  row {seq.row}: request {seq.request_id}, sequence {seq.index}, tokens {start} to {start + count}"
            for seq, start, count in zip(plan.sequences, plan.starts, plan.num_new, strict=True)
        ]
        stats = self.snapshot()
        counts = (
            f"{stats.num_waiting} waiting, {stats.num_running} running, {stats.num_paused} preempted, "
            f"{stats.num_free_blocks} of {stats.num_blocks} blocks free, step {stats.num_steps}, {len(self._in_flight)} in flight"
        )
        return "\n".join([f"{len(plan)} rows, {plan.num_tokens} tokens; {counts}:", *lines])


def _info(error: Exception) -> ErrorInfo:
    """The error in the form that is sent to the client. An unexpected error is logged."""
    if isinstance(error, RequestError):
        return ErrorInfo(error.code, str(error), error.status, None, error.field, error.limit, error.cure)
    if isinstance(error, StokerError):
        return ErrorInfo(error.code, str(error), error.status, getattr(error, "retry_after_s", None))
    log.error("a request could not be started: %r", error, exc_info=error)
    return ErrorInfo("internal_error", f"the request could not be started: {error}")
