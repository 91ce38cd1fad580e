"""A simulated replica: the real scheduler and KV cache manager; a step takes the time that StepTimes states.

Steps that only decode are run together up to the one in which a sequence ends. If a sequence is added before that, the steps after the
current one are planned again. Evictions of blocks during these steps are reported to the fleet when the step ends that caused them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq

import msgspec

from stoker.base.config import TOKENS_PER_BLOCK, RuntimeConfig, check_choice, check_range
from stoker.base.errors import ConfigError
from stoker.router.core.fleet import Fleet
from stoker.router.core.replica import Replica
from stoker.runtime.kv.events.log import BlockChanges, BlockEventLog
from stoker.runtime.kv.events.wire import block_hashes
from stoker.runtime.kv.prefix_index import PrefixNode
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.group_scheduler import GroupScheduler
from stoker.runtime.schedule.plan import StepOutcome
from stoker.runtime.transfer.held_prompts import HeldPrompts
from stoker.simulation.running_steps import RunningSteps
from stoker.simulation.step_times import StepTimes


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of each replica."""

    max_batch_size: int = 256
    """Sequences in one step."""

    max_num_tokens: int = 8192
    """Tokens in one step."""

    kv_cache_tokens: int = 400_000
    """Token positions of the KV cache."""

    tokens_per_block: int = 64
    """Token positions of a block: 16, 32, 64 or 128."""

    overlap: bool = True
    """As `stoker serve --overlap`: a step is planned when the one before it begins, so that a request joins the second step after its
    arrival."""

    target_itl_ms: float | None = None
    """As `stoker serve --target-itl-ms`."""

    target_ttft_ms: float | None = None
    """As `stoker serve --target-ttft-ms`."""

    num_gpus: int = 1
    """GPUs of one replica (tensor × pipeline parallel), for the cost. Their effect on time is in the step times."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "kv_cache_tokens"):
            check_range(name, getattr(self, name), 1, 1 << 30)
        RuntimeConfig(target_itl_ms=self.target_itl_ms, target_ttft_ms=self.target_ttft_ms)
        check_range("num_gpus", self.num_gpus, 1, 1024)
        check_choice("tokens_per_block", self.tokens_per_block, TOKENS_PER_BLOCK)
        if self.kv_cache_tokens < self.tokens_per_block:
            raise ConfigError(f"kv_cache_tokens={self.kv_cache_tokens} is less than one block.", cure="Raise it.")
        if self.max_num_tokens < self.max_batch_size:
            limit = f"max_num_tokens={self.max_num_tokens} is less than max_batch_size={self.max_batch_size}"
            raise ConfigError(f"{limit}, which is not simulated.", cure="Lower max_batch_size, or raise max_num_tokens.")


class SimulatedReplica:
    """The scheduler of one replica, the step that it runs, and the events that its fleet receives after each step."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        settings: ReplicaSettings,
        step_times: StepTimes,
        prefix_reuse: bool,
        has_transfers: bool,
        index_answers: bool,
    ) -> None:
        """`has_transfers`: prompts of other replicas arrive, whose blocks are allocated while steps run."""
        self.replica = replica
        self.max_seq_len = settings.kv_cache_tokens
        self._fleet = fleet
        self._step_times = step_times
        self._log = BlockEventLog()
        self.scheduler = GroupScheduler(
            num_blocks=settings.kv_cache_tokens // settings.tokens_per_block,
            tokens_per_block=settings.tokens_per_block,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_seq_len=self.max_seq_len,
            target_itl_s=settings.target_itl_ms / 1000 if settings.target_itl_ms is not None else None,
            target_ttft_s=settings.target_ttft_ms / 1000 if settings.target_ttft_ms is not None else None,
            prefix_reuse=prefix_reuse,
            event_log=self._log,
            stops_at_blocks=has_transfers,
            index_answers=index_answers,
        )
        self._has_target = self.scheduler.budget.has_target
        self._held = HeldPrompts(self.scheduler.kv_cache)
        self._digests: dict[int, Seq[bytes]] = {}  # of the prompts of sequences without a token, by seq_id
        self._overlap = settings.overlap
        self._late: deque[tuple[float, Sequence]] = deque()  # (arrival, sequence) of those that the next planned step does not contain
        self._before: RunningSteps | None = None  # the steps before, if the host has planned the next one when it had launched them
        self.sent_s = 0.0  # when the host has the tokens of the ended steps; with overlap, it launches the next one before
        self.steps: RunningSteps | None = None
        self.imports: deque[Sequence] = deque()  # whose prompts have arrived from other replicas, and wait for blocks
        self.end_s = math.inf  # of the running steps
        self._has_transfers = has_transfers
        self._reports = prefix_reuse and not has_transfers  # evictions while steps run; otherwise they do not happen, or end the steps
        self._num_passed = 0  # running steps after which evictions are reported
        self.report_s = math.inf  # when they end

    def add(self, seq: Sequence, digests: Seq[bytes], now_s: float) -> None:
        """Queue a sequence. `digests`: of the blocks of its prompt, which block events contain."""
        self._digests[seq.seq_id] = digests
        self._queue(seq, now_s)

    def _queue(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence. If steps run, the next one is launched already with overlap."""
        if self._overlap and self.steps is not None:
            self._late.append((now_s, seq))
        else:
            self.scheduler.add(seq)

    def add_imported(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence whose prompt another replica has computed, as soon as there are blocks for it."""
        self.imports.append(seq)
        self.admit_imports(now_s)

    def admit_imports(self, now_s: float) -> None:
        """Queue the sequences whose blocks fit, in order. The prompt is computed here if nothing runs that could release blocks."""
        while self.imports:
            seq = self.imports[0]
            targets = self._held.allocate(seq.seq_id, seq.prefix_root, seq.tokens, seq.max_tokens)
            if targets is not None:
                self._held.hold(seq.seq_id, seq.prefix_root, seq.tokens, targets)
            elif self.scheduler.has_work:
                return
            self.imports.popleft()
            self._queue(seq, now_s)

    def run(self, now_s: float) -> bool:
        """Start steps, or let the running ones end after the current one. Returns whether `end_s` has changed."""
        if self.steps is None:
            self._before = None
            return self.start(now_s)
        if self.steps.count == 1 or not self.steps.stop(now_s, int(self._overlap)):
            return False
        self.end_s = self.steps.end_s(self.steps.count)
        if self.report_s >= self.end_s:
            self.report_s = math.inf
        return True

    def start(self, now_s: float) -> bool:
        """Plan steps and start them on an idle replica. False if there is nothing to compute."""
        self.sent_s = now_s
        plan, num_held = self.scheduler.plan_steps(now_s), len(self._held) if self._has_transfers else 0
        if self._late:
            if not plan.num_tokens:
                self._admit_late(now_s)
                self._before = None
                plan = self.scheduler.plan_steps(now_s)
            else:
                plan.num_equal_steps = 1
        if not plan.num_tokens and num_held:  # the first waiting sequence needs blocks that are held for later ones
            self._held.release_all()
            self.scheduler.on_free_blocks()
            self._before = None
            plan = self.scheduler.plan_steps(now_s)
        if not plan.num_tokens:
            return False
        if num_held:
            for seq in plan.sequences:
                self._held.release(seq.seq_id)
        steps = self.steps = RunningSteps(plan, now_s, *self._step_times.series(plan))
        if plan.num_prefill_tokens and (launch_s := self._step_times.launch_time_s(plan)):
            self._launch(steps, launch_s)
        self.end_s = steps.end_s(steps.count)
        if self._reports and steps.count > 1:
            self._plan_report(steps)
        return True

    def _launch(self, steps: RunningSteps, launch_s: float) -> None:
        """The host launches a step that is not captured. With overlap, it began when it had launched the step before."""
        before = self._before if self._overlap else None
        steps.launch((steps.start_s if before is None else before.last_start_s) + launch_s, self._overlap)
        if before is not None:
            self.sent_s = steps.launched_s

    def _admit_late(self, until_s: float) -> None:
        """Queue the sequences that arrived at or before a time."""
        while self._late and self._late[0][0] <= until_s:
            self.scheduler.add(self._late.popleft()[1])

    def _plan_report(self, steps: RunningSteps) -> None:
        """Set when evictions are reported next."""
        self._num_passed = self.scheduler.num_steps_to_events(steps.count)
        self.report_s = steps.end_s(self._num_passed) if self._num_passed else math.inf

    def report(self) -> None:
        """Apply the block events up to `report_s` to the fleet, while the steps after that run."""
        assert self.steps is not None
        self.scheduler.pass_steps(self._num_passed)
        self._apply(self._log.pop())
        self._plan_report(self.steps)

    def end_steps(self, now_s: float) -> tuple[RunningSteps, StepOutcome]:
        """Commit the running steps, and apply their block events to the fleet."""
        steps, self.steps, self.end_s, self.report_s = self.steps, None, math.inf, math.inf
        assert steps is not None
        if self._has_target:
            self.scheduler.record_time(steps.plan, steps.first_s)
        self._before = steps
        if self._late:
            self._admit_late(steps.last_start_s)
        outcome = self.scheduler.commit_steps(steps.plan, steps.count)
        for seq in outcome.sequences:
            if (digests := self._digests.pop(seq.seq_id, None)) and isinstance(seq.prefix, PrefixNode):
                seq.prefix.set_digests(digests[: seq.num_hashed])
        if changes := self._log.pop():
            self._apply(changes)
        if self.imports:
            self.admit_imports(now_s)
        return steps, outcome

    def _apply(self, changes: Seq[BlockChanges]) -> None:
        """Change the blocks of the replica in the index of the fleet."""
        slot, index = self.replica.slot, self._fleet.stored
        for nodes, stored in changes:
            (index.store if stored else index.remove)(slot, block_hashes(nodes))
