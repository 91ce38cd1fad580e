"""A simulated replica: the real scheduler and KV cache manager; a step takes the time that StepTimes states."""

from __future__ import annotations

from collections import deque

import msgspec

from stoker.base.config import TOKENS_PER_BLOCK, RuntimeConfig, check_choice, check_range
from stoker.base.errors import ConfigError
from stoker.router.core.fleet import Fleet
from stoker.router.core.replica import Replica
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.events.wire import block_hash
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import StepOutcome, StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.transfer.held_prompts import HeldPrompts
from stoker.simulation.step_times import StepTimes

TOKEN = 7  # what every step samples


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


class SimulatedReplica:
    """The scheduler of one replica, the step that it runs, and the events that its fleet receives after each step."""

    def __init__(self, fleet: Fleet, replica: Replica, settings: ReplicaSettings, step_times: StepTimes) -> None:
        self.replica = replica
        self.max_seq_len = settings.kv_cache_tokens
        self._fleet = fleet
        self._step_times = step_times
        self._log = BlockEventLog()
        self.scheduler = Scheduler(
            num_blocks=settings.kv_cache_tokens // settings.tokens_per_block,
            tokens_per_block=settings.tokens_per_block,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_seq_len=self.max_seq_len,
            target_itl_s=settings.target_itl_ms / 1000 if settings.target_itl_ms is not None else None,
            target_ttft_s=settings.target_ttft_ms / 1000 if settings.target_ttft_ms is not None else None,
            event_log=self._log,
        )
        self._held = HeldPrompts(self.scheduler.kv_cache)
        self._plan: StepPlan | None = None
        self.imports: deque[Sequence] = deque()  # whose prompts have arrived from other replicas, and wait for blocks
        self._duration_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a step is running."""
        return self._plan is not None

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.scheduler.add(seq)

    def add_imported(self, seq: Sequence) -> None:
        """Queue a sequence whose prompt another replica has computed, as soon as there are blocks for it."""
        self.imports.append(seq)
        self.admit_imports()

    def admit_imports(self) -> None:
        """Queue the sequences whose blocks fit, in order. The prompt is computed here if nothing runs that could release blocks."""
        while self.imports:
            seq = self.imports[0]
            targets = self._held.allocate(seq.seq_id, seq.prefix_root, seq.tokens, seq.max_tokens)
            if targets is not None:
                self._held.hold(seq.seq_id, seq.prefix_root, seq.tokens, targets)
            elif self.scheduler.has_work:
                return
            self.imports.popleft()
            self.scheduler.add(seq)

    def start_step(self, now_s: float) -> float | None:
        """Start the next step, and return when it ends; None if there is nothing to compute."""
        plan = self.scheduler.plan(now_s)
        if not plan.sequences and len(self._held):  # the first waiting sequence needs blocks that are held for later ones
            self._held.release_all()
            self.scheduler.on_free_blocks()
            plan = self.scheduler.plan(now_s)
        if not plan.sequences:
            return None
        for seq in plan.sequences if len(self._held) else ():
            self._held.release(seq.seq_id)
        self._plan, self._duration_s = plan, self._step_times.of(plan)
        return now_s + self._duration_s

    def end_step(self) -> tuple[StepPlan, StepOutcome]:
        """Commit the running step, and apply its block events to the fleet."""
        plan, self._plan = self._plan, None
        assert plan is not None
        self.scheduler.record_time(plan, self._duration_s)
        outcome = self.scheduler.commit(plan, [[TOKEN] if samples else [] for samples in plan.samples])
        slot, stored = self.replica.slot, self._fleet.stored
        for change in self._log.pop():
            if change.stored:
                stored.store(slot, (block_hash(change.node),))
            else:
                stored.remove(slot, (block_hash(change.node),))
        if self.imports:
            self.admit_imports()
        return plan, outcome
