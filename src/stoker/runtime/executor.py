"""The executor: owns one engine's step loop. Receive → plan → run → commit → emit."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import RankError, StokerError, UnavailableError
from stoker.base.logging import get_logger
from stoker.base.types import FinishReason
from stoker.runtime.admission import Admission, Beginner
from stoker.runtime.client import Cancel, ExecutorInfo, Mailbox, Message, Pause, Shutdown, StatsQuery, Submit
from stoker.runtime.request import ErrorInfo, ExecutorStats, Sequence, SequenceOutput, TokenRequest
from stoker.runtime.schedule.plan import StepOutcome, StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.step_times import StepTimes
from stoker.runtime.watchdog import Watchdog
from stoker.runtime.worker.model_runner import StepResult

log = get_logger(__name__)

_NO_TOKEN = ErrorInfo("bad_logits", "no token can be chosen: the logits are not numbers, or every token is banned.")
_IDLE_POLL_S = 0.5  # an idle loop wakes so often, to beat its heart and look at deadlines
_PREPARING_POLL_S = 0.002  # one whose requests wait for their grammars looks so often whether one is ready


class Runner(Beginner, Protocol):
    """What the executor asks of the device side; a stub of it measures the executor alone."""

    def launch(self, plan: StepPlan) -> Handle: ...
    def zero_blocks(self, blocks: list[int]) -> None: ...


class Handle(Protocol):
    """A step on its way."""

    def wait(self) -> StepResult: ...


class Ranks(Protocol):
    """The processes that hold the rest of the model: `check` and, after an error, `blame` raise RankError when one failed."""

    num_stages: int

    def check(self) -> None: ...
    def blame(self) -> None: ...
    def close(self) -> None: ...


class Executor:
    """One engine's loop, in one thread. With overlap, a step is planned and launched while the one before it runs.

    With pipeline stages, as many steps as there are stages are in flight.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, mailbox: Mailbox, info: ExecutorInfo, config: RuntimeConfig, ranks: Ranks | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.mailbox = mailbox
        self.info = info
        self.config = config
        self.stats = ExecutorStats(
            num_blocks=scheduler.kv_cache.pool.num_blocks,
            tokens_per_block=scheduler.kv_cache.tokens_per_block,
            max_batch_size=config.max_batch_size or info.limits.max_batch_size,
        )
        self._ranks = ranks
        self._num_stages = ranks.num_stages if ranks is not None else 1
        overlapped = 2 if config.overlap and info.device != "cpu" else 1
        self._depth = self._num_stages if self._num_stages > 1 else overlapped
        # A sequence is in one stage at a time: the first needs the token that the last one chose.
        self.admission = Admission(runner, scheduler, config.max_queue_size, waits_for_ids=self._num_stages > 1)
        self.watchdog = Watchdog(info.step_timeout_s)
        self.step_times = StepTimes()
        self._in_flight: deque[tuple[StepPlan, Handle, float]] = deque()
        self._outputs: list[SequenceOutput] = []
        self._announced: set[int] = set()  # seq_ids whose first output (with cached_tokens) went out
        self._shutdown: Shutdown | None = None

    def run(self) -> None:
        """Loop until shut down. An error of the loop itself is logged, told to every client, and raised."""
        reason = "the executor stopped"
        self.watchdog.start()
        try:
            while self._shutdown is None or (self._shutdown.drain and (self.scheduler.has_work or self.admission.num_preparing)):
                self.turn(_IDLE_POLL_S)
        except BaseException as error:
            reason = f"the executor failed: {error!r}"
            log.exception("the step loop failed")
            raise
        finally:
            self.watchdog.stop()
            self.mailbox.close(reason)
            self.close()

    def close(self) -> None:
        """End the other ranks' processes."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def is_busy(self) -> bool:
        """Whether some sequence waits, runs or is on its way."""
        return bool(self._in_flight) or self.scheduler.has_work or bool(self.admission.num_preparing)

    def turn(self, timeout_s: float) -> None:
        """One iteration: messages, then at most one launch and one commit."""
        if self._ranks is not None:
            self._ranks.check()
        busy = bool(self._in_flight) or self.scheduler.has_work
        idle_s = min(timeout_s, _PREPARING_POLL_S) if self.admission.num_preparing else timeout_s
        for message in self.mailbox.poll(0.0 if busy else idle_s):
            self._receive(message)
        now = time.monotonic()
        for seq, error in self.admission.advance():
            self._finish(seq, _info(error))
        for seq in self.admission.expire(now):
            self._finish(seq)
        self._launch(now)
        if self._in_flight and (len(self._in_flight) >= self._depth or not self._launched):
            self._commit()
        if self._outputs:
            self.mailbox.send(self._outputs)
            self._outputs = []
        self.stats.heartbeat_s = time.monotonic()

    # Messages.

    def _receive(self, message: Message) -> None:
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
            case Shutdown():
                self._shutdown = message
                if not message.drain:
                    self._cancel_all()

    def _submit(self, request: TokenRequest) -> None:
        try:
            if self._shutdown is not None:
                raise UnavailableError("the server is draining.", cure="Send the request to another replica.")
            self.admission.admit(request)
        except Exception as error:
            self.stats.num_failed += 1
            info = _info(error)
            self._outputs += [
                SequenceOutput(request.request_id, index, [], FinishReason.ERROR, error=info) for index in range(request.params.n)
            ]

    def _cancel_all(self) -> None:
        for request_id in self.admission.request_ids():
            for seq in self.admission.cancel(request_id):
                self._finish(seq)

    # Steps.

    _launched = False

    def _launch(self, now: float) -> None:
        self._launched = False
        plan = self.scheduler.plan(now)
        self._clean()
        if not plan.sequences:
            return
        started = time.monotonic()
        try:
            with self.watchdog.step(lambda: self._describe(plan)):
                handle = self.runner.launch(plan)
        except Exception as error:
            self._blame(error)
            while self._in_flight:  # plans end in order
                self._commit()
            self._fail(plan, error)
            return
        self._launched = True
        self._in_flight.append((plan, handle, started))
        self._count(plan)

    def _commit(self) -> None:
        plan, handle, launched = self._in_flight.popleft()
        try:
            with self.watchdog.step(lambda: self._describe(plan)):
                result = handle.wait()
        except Exception as error:
            self._fail(plan, error)
            return
        self.stats.last_step_time_s = self.step_times.record(launched, len(plan), plan.num_tokens)
        outcome = self.scheduler.commit(plan, self._tokens(plan, result))
        self._emit(outcome, result)
        for seq in outcome.finished:
            self._forget(seq)

    def _tokens(self, plan: StepPlan, result: StepResult) -> list[list[int]]:
        """The ids that each row of the plan yielded. Ends the sequences of rows whose logits are not finite."""
        sampled = iter(result.token_ids)
        token_ids = result.token_ids if all(plan.samples) else [next(sampled) if samples else [] for samples in plan.samples]
        for seq, ids in zip(plan.sequences, token_ids, strict=True):
            if ids and ids[-1] < 0 and seq.finish_reason is None:
                self.scheduler.kv_cache.poison(seq.blocks)
                self.scheduler.end(seq, FinishReason.ERROR)
                self._finish(seq, seq.fault or _NO_TOKEN)
        return token_ids

    def _emit(self, outcome: StepOutcome, result: StepResult) -> None:
        """Queue one output for each sequence that gained tokens."""
        outputs, announced = self._outputs, self._announced
        scores = dict(zip((seq.seq_id for seq in result.sequences), result.logprobs, strict=True)) if result.logprobs else {}
        for seq, ids in zip(outcome.sequences, outcome.token_ids, strict=True):
            output = SequenceOutput(seq.request_id, seq.index, ids, seq.finish_reason, seq.stop_id)
            if seq.seq_id not in announced:
                announced.add(seq.seq_id)
                output.cached_tokens = seq.num_cached
                output.prompt_logprobs = result.prompt_logprobs.get(seq.seq_id)
            if scores and (score := scores.get(seq.seq_id)) is not None:
                output.logprobs = score[: len(ids)]
            outputs.append(output)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """The oldest step raised: its sequences end with an error; the others go on. Without a rank nothing does."""
        self._blame(error)
        log.error("a step of %d rows failed: %r", len(plan), error, exc_info=error)
        for seq in self.scheduler.fail(plan):
            self._finish(seq, ErrorInfo("step_failed", f"the step failed: {error}"))

    def _blame(self, error: Exception) -> None:
        """Raise RankError when a rank is behind the error of a step: another one, or else this."""
        if self._ranks is not None:
            self._ranks.blame()
        if isinstance(error, RankError):
            raise error

    def _clean(self) -> None:
        """Zero what nobody reads any more and may not be numbers: masked places are still multiplied by zero.

        After a plan, for what a sequence gave up at any time until then may be another's in it.
        """
        if blocks := self.scheduler.kv_cache.pop_poisoned():
            self.runner.zero_blocks(blocks)

    # Ends.

    def _finish(self, seq: Sequence, error: ErrorInfo | None = None) -> None:
        """Emit the last output of a sequence that ended without gaining a token."""
        self._outputs.append(SequenceOutput(seq.request_id, seq.index, [], seq.finish_reason, error=error))
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        self.runner.remove(seq)
        self._announced.discard(seq.seq_id)
        match seq.finish_reason:
            case FinishReason.CANCELLED | FinishReason.DEADLINE:
                self.stats.num_cancelled += 1
            case FinishReason.ERROR:
                self.stats.num_failed += 1
            case _:
                self.stats.num_finished += 1

    # Numbers.

    def _count(self, plan: StepPlan) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.row_steps += len(plan)
        stats.last_step_rows = len(plan)
        stats.last_step_tokens = plan.num_tokens
        stats.last_step_prefill_tokens = plan.num_prefill_tokens
        stats.num_decode_tokens += plan.num_tokens - plan.num_prefill_tokens
        stats.num_prefill_tokens += plan.num_prefill_tokens

    def snapshot(self) -> ExecutorStats:
        """The counters as they are now; a copy, for the loop goes on counting."""
        scheduler, stats = self.scheduler, self.stats
        stats.num_waiting = self.admission.num_waiting
        stats.num_running = scheduler.num_running
        stats.num_paused = scheduler.num_preempted
        stats.num_free_blocks = scheduler.kv_cache.pool.num_free
        stats.num_cached_blocks = scheduler.kv_cache.pool.num_cached
        stats.num_reused_tokens = scheduler.num_reused_tokens
        stats.busy_time_s = self.step_times.total_s
        stats.num_preemptions = scheduler.num_preemptions
        return msgspec.structs.replace(stats)

    def _describe(self, plan: StepPlan) -> str:
        """A step and what is around it, for the log."""
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
    """What the client is told of an error of its request alone."""
    if isinstance(error, StokerError):
        return ErrorInfo(error.code, str(error), error.status, getattr(error, "retry_after_s", None))
    log.error("a request could not begin: %r", error, exc_info=error)
    return ErrorInfo("internal_error", f"the request could not begin: {error}")
