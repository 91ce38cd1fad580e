"""The scheduler: plans steps from the counters of sequences, and commits their results."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.base.errors import RequestError
from stoker.base.types import FinishReason
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.manager import KVCacheManager
from stoker.runtime.kv.snapshots import StateSnapshots
from stoker.runtime.kv.tiers import HostTier, TierOccupancy
from stoker.runtime.request import NO_ADAPTER, Sequence, Status, TokenRequest
from stoker.runtime.schedule.draft_length import DraftLength
from stoker.runtime.schedule.draft_paths import Move, accepted_path, path_moves
from stoker.runtime.schedule.drafter_progress import DrafterProgress
from stoker.runtime.schedule.node_acceptance import NodeAcceptance
from stoker.runtime.schedule.plan import StepOutcome, StepPlan
from stoker.runtime.schedule.planner import Planner
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.proposers import PROPOSERS
from stoker.runtime.schedule.running_set import RunningSet
from stoker.runtime.schedule.step_budget import StepBudget

SEQUENCE_COST = 128  # prompt tokens that count as much as one more sequence on a data-parallel rank


class BlockCounts(NamedTuple):
    """The number of blocks, of those without references, and of those of them whose contents can be reused."""

    total: int
    free: int
    cached: int


class Scheduler:
    """Decides which sequences compute how many tokens in each step.

    One rule covers prefill, chunked prefill, prefix reuse, decode and recompute after preemption: a step computes tokens that a sequence
    has and that are not computed. plan() may be called again before earlier plans are committed; rows then continue from tokens whose ids
    the host does not know yet. Plans are committed in order. The blocks and the row of a sequence are reused only when no planned step
    contains it.

    A step consists of decodes, then unfinished prefills, then admissions in the order of the policy. `max_batch_size` limits the rows of a
    step, `max_num_tokens` its tokens, and `max_num_sequences` the sequences that hold blocks. If more sequences hold blocks than fit into
    a step, they alternate. With `num_stages` pipeline stages the sequences are spread over that number of steps in flight. Without
    `chunked_prefill` a prompt is computed in a single step. `num_adapters` is the number of low-rank adapters that the model has. A
    row has at most `draft_tokens` drafts of the proposer, fewer if that is faster (`adaptive_drafts`), and none in a step with prefills
    unless `drafts_beside_prefill` is set. `tree`: the form of the drafts that the proposer returns; None: chains. The latency
    targets choose the prompt tokens of a step from the times that `record_time` is called with. `snapshots`: those of the states
    of a model with recurrent states. `first_row`: of the rows of the device buffers. A drafter takes `draft_share` of the time of the
    model for the same tokens; with `drafter_catches_up` it runs only in steps after which drafts are likely (`DrafterProgress`); with
    `drafter_has_state` it has recurrent states.
    """

    plan_type = StepPlan
    planner_type = Planner
    kv_cache_type = KVCacheManager

    def __init__(
        self,
        *,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        max_num_sequences: int | None = None,
        policy: str = "guaranteed_no_evict",
        chunked_prefill: bool = True,
        prefix_reuse: bool = True,
        num_stages: int = 1,
        proposer: str = "none",
        draft_tokens: int | None = None,
        adaptive_drafts: bool = False,
        drafts_beside_prefill: bool = True,
        drafter_catches_up: bool = False,
        drafter_has_state: bool = False,
        draft_share: float = 0.0,
        tree: DraftTree | DynamicTree | None = None,
        target_itl_s: float | None = None,
        target_ttft_s: float | None = None,
        num_adapters: int = 0,
        host_tier: HostTier | None = None,
        event_log: BlockEventLog | None = None,
        snapshots: StateSnapshots | None = None,
        first_row: int = 0,
    ) -> None:
        self.kv_cache = self.kv_cache_type(
            num_blocks, tokens_per_block, prefix_reuse=prefix_reuse, host_tier=host_tier, event_log=event_log, snapshots=snapshots
        )
        self.max_num_tokens = max_num_tokens
        self.max_seq_len = max_seq_len
        self.chunked_prefill = chunked_prefill
        self.num_adapters = num_adapters
        self._running_set = RunningSet(self.kv_cache, POLICIES.get(policy)(), max_num_sequences or max_batch_size, first_row)
        max_rows = min(max_batch_size, max_num_tokens)
        self._proposer = PROPOSERS.get(proposer)()
        max_drafts = self._proposer.max_drafts
        max_drafts = max_drafts if draft_tokens is None else min(draft_tokens, max_drafts)
        if tree is not None:
            tree = tree.prefix(min(max_drafts, len(tree)))
        self.draft_length = DraftLength(
            max_drafts,
            is_adaptive=adaptive_drafts,
            draft_share=draft_share,
            limits_attempts=self._proposer.runs_on_device,
            nodes=NodeAcceptance(len(tree), tree.max_depth) if tree is not None else None,
        )
        self._drafter_progress: DrafterProgress | None = None
        if drafter_catches_up:
            self._drafter_progress = DrafterProgress(num_blocks, tokens_per_block, max_num_tokens, has_state=drafter_has_state)
        self.budget = StepBudget(max_num_tokens, target_itl_s=target_itl_s, target_ttft_s=target_ttft_s)
        self._planner = self.planner_type(
            self._running_set,
            self._proposer,
            max_rows=max_rows,
            budget=self.budget,
            chunked_prefill=chunked_prefill,
            draft_length=self.draft_length,
            drafts_beside_prefill=drafts_beside_prefill,
            drafter_progress=self._drafter_progress,
            pads_prefills=snapshots is not None or drafter_has_state,
            tree=tree,
        )
        self._moves: list[Move] = []  # of committed steps, for the next plan
        self._num_stages = num_stages
        self._in_flight: deque[StepPlan] = deque()
        self._requests: dict[str, list[Sequence]] = {}  # sequences that have not ended, by request
        self._next_deadline = math.inf
        self._paused = False

    # State.

    @property
    def num_waiting(self) -> int:
        """The number of sequences that have never held blocks, which max_queue_size limits."""
        return self._running_set.queue.num_new

    @property
    def num_preempted(self) -> int:
        """The number of preempted sequences that wait to be admitted again."""
        return self._running_set.queue.num_preempted

    @property
    def num_running(self) -> int:
        """The number of sequences that hold blocks."""
        return self._running_set.num_holding

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions since the start."""
        return self._running_set.num_preemptions

    @property
    def num_reused_tokens(self) -> int:
        """The number of prompt tokens that were reused from the cache since the start."""
        return self._running_set.num_reused_tokens

    @property
    def num_in_flight(self) -> int:
        """The number of plans that are not committed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan or to commit. New sequences do not count while admission is paused."""
        return bool(self.num_running or self.num_preempted or (self.num_waiting and not self._paused))

    @property
    def next_deadline(self) -> float:
        """A lower bound of the next deadline in monotonic seconds; infinity if no sequence has a deadline."""
        return self._next_deadline

    @property
    def blocks(self) -> BlockCounts:
        """The number of blocks, and of those without references."""
        pool = self.kv_cache.pool
        return BlockCounts(pool.num_blocks, pool.num_free, pool.num_cached)

    @property
    def tokens_per_block(self) -> int:
        """The number of tokens of a block."""
        return self.kv_cache.tokens_per_block

    @property
    def event_log(self) -> BlockEventLog | None:
        """The changes of the prefix index, if they are published."""
        return self.kv_cache.event_log

    def occupancy(self, num_cells: int) -> list[TierOccupancy]:
        """What the blocks of each tier hold, in at most `num_cells` cells per tier."""
        return self.kv_cache.occupancy(num_cells)

    @property
    def room(self) -> tuple[int, ...]:
        """What decides whether `placement_cost` is None, besides the sequence."""
        return (self.blocks.free, self.kv_cache.num_reserved, self.num_running, len(self._running_set.queue))

    def placement_cost(self, seq: Sequence) -> int | None:
        """The cost in tokens of adding `seq` to this data-parallel rank (`schedule.data_parallel`). None: it could not be admitted now."""
        missing = self._running_set.num_missing_tokens(seq)
        num_sequences = self.num_running + len(self._running_set.queue)
        return None if missing is None else missing + self._running_set.num_pending_tokens + SEQUENCE_COST * num_sequences

    def running(self) -> list[Sequence]:
        """The running sequences, in the order in which the next step selects them."""
        return list(self._running_set.running.values())

    def waiting(self, count: int) -> list[Sequence]:
        """The first `count` waiting sequences, new and preempted ones, in the order in which they are admitted."""
        return self._running_set.queue.first(count)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        """The ids of requests with a sequence that has not ended."""
        return list(self._requests)

    def retry_after_s(self, now: float) -> float:
        """The seconds after which the queue probably has room: the mean time between recent admissions, from 1 to 60."""
        return self._running_set.queue.retry_after_s(now)

    def check(self, request: TokenRequest) -> None:
        """Raise RequestError for a request that can never run: a wrong number of prompt tokens, an unknown adapter and the like."""
        num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        if not 1 <= num_prompt < self.max_seq_len:
            raise RequestError("prompt_ids", request.prompt_ids, f"a prompt has 1 to {self.max_seq_len - 1} tokens, this one {num_prompt}")
        if not NO_ADAPTER <= request.adapter < self.num_adapters:
            limit = f"its indices are 0 to {self.num_adapters - 1}" if self.num_adapters else "it has none"
            raise RequestError("adapter", request.adapter, f"the engine has no such adapter; {limit}", cure="Use -1 for no adapter.")
        if not self.chunked_prefill and num_prompt > self.max_num_tokens:
            limit = f"without chunked prefill a prompt has at most max_num_tokens={self.max_num_tokens} tokens, this one {num_prompt}"
            raise RequestError(
                "prompt_ids", request.prompt_ids, limit, cure="Shorten it, or serve with chunked_prefill or a larger max_num_tokens."
            )
        num_tokens = min(num_prompt + max_tokens, self.max_seq_len) - 1
        capacity = self.kv_cache.pool.num_blocks * self.kv_cache.tokens_per_block
        if self.kv_cache.num_blocks_for(num_tokens) > self.kv_cache.pool.num_blocks:
            limit = f"with a prompt of {num_prompt} tokens it needs {num_tokens} token positions of the KV cache, which has {capacity}"
            raise RequestError("max_tokens", max_tokens, limit, cure="Request fewer tokens, or serve with a larger KV cache.")

    # Sequences.

    def limit(self, seq: Sequence) -> None:
        """Set the largest number of tokens of a sequence."""
        seq.max_tokens = min(seq.max_tokens, self.max_seq_len - seq.num_prompt)
        seq.max_computed = seq.num_prompt + seq.max_tokens - 1

    def add(self, seq: Sequence) -> None:
        """Queue a sequence whose request passed `check`. The sequences of a request are added in the order of their index."""
        self.limit(seq)
        if self._proposer.max_drafts and not self._proposer.reads_token_ids and seq.min_tokens:
            seq.waits_for_ids = True  # while a step that verifies drafts is in flight, the length of the sequence is not known
        self._requests.setdefault(seq.request_id, []).append(seq)
        if seq.deadline is not None:
            self._next_deadline = min(self._next_deadline, seq.deadline)
        self._running_set.enqueue(seq)

    def cancel(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """End the sequences of a request, or only the one with `index`.

        Returns those that had not ended before; empty if the id is unknown.
        """
        ended = [seq for seq in self._requests.get(request_id, ()) if index is None or seq.index == index]
        for seq in ended:
            self.end(seq, FinishReason.CANCELLED)
        return ended

    def expire(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline is at or before `now`, and return them. Called before plan()."""
        if now < self._next_deadline:
            return []
        timed = [(seq.deadline, seq) for group in self._requests.values() for seq in group if seq.deadline is not None]
        ended = [seq for deadline, seq in timed if deadline <= now]
        self._next_deadline = min((deadline for deadline, _ in timed if deadline > now), default=math.inf)
        for seq in ended:
            self.end(seq, FinishReason.DEADLINE)
        return ended

    def end(self, seq: Sequence, reason: FinishReason, stop_id: int | None = None) -> None:
        """End a waiting or running sequence, unless it has ended. Tokens that planned steps sample for it are dropped."""
        if seq.status is Status.FINISHED:
            return
        group = self._requests[seq.request_id]
        group.remove(seq)
        if not group:
            del self._requests[seq.request_id]
        seq.finish_reason, seq.stop_id = reason, stop_id
        self._running_set.end(seq)

    def pause(self, paused: bool) -> None:
        """Stop or resume admitting new sequences. Running and preempted sequences continue."""
        self._paused = paused
        self._running_set.admission_blocked = False

    def poison(self, seq: Sequence) -> None:
        """Mark the blocks of a sequence, which may contain NaN."""
        self.kv_cache.poison(seq.blocks)

    def pop_poisoned(self) -> list[int]:
        """Poisoned blocks that have become free since the last call. They must be zeroed before the next step is launched."""
        return self.kv_cache.pop_poisoned()

    def on_free_blocks(self) -> None:
        """Blocks were released that belonged to no sequence, so that the first waiting sequence may fit now."""
        self._running_set.admission_blocked = False

    # Steps.

    def plan(self, now: float) -> StepPlan:
        """Plan the next step at the monotonic time `now`. The plan is empty if nothing can be computed before a commit or an arrival."""
        plan = self.plan_type()
        if self._num_stages > 1:  # spread the sequences over the stages
            present = self.num_running + self.num_preempted + self.num_waiting
            self._planner.limit_rows(-(-present // self._num_stages))
        self._planner.fill(plan, now, paused=self._paused)
        if len(plan):
            plan.transfers = self.kv_cache.pop_transfers()
            plan.moves, self._moves = self._moves, []
            self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, token_ids: Seq[list[int]]) -> StepOutcome:
        """Append the ids that each row of a step yielded to its sequence. A row that does not sample has an empty list.

        A row with k drafts yields up to k + 1 ids. Ids after one that ends the sequence are dropped. A row that samples and yields no id is
        computed again. Raises ValueError for a wrong number of rows and for plans that are committed out of order.
        """
        if len(token_ids) != len(plan.sequences):
            raise ValueError(f"token ids of {len(token_ids)} rows for a step of {len(plan.sequences)} rows")
        self._pop_in_flight(plan)
        if plan.transfers:
            self.kv_cache.end_transfers(plan.transfers, succeeded=True)
        outcome = StepOutcome()
        gained, gained_ids = outcome.sequences, outcome.token_ids
        size = self.kv_cache.tokens_per_block
        running, finished, proposes = Status.RUNNING, Status.FINISHED, self._proposer.max_drafts > 0
        rows = zip(plan.sequences, plan.starts, plan.num_new, plan.samples, plan.drafts, plan.parents, token_ids, strict=True)
        for seq, start, num_new, samples, drafts, parents, ids in rows:
            seq.num_in_flight -= 1
            if samples:
                seq.num_pending -= 1 + len(drafts) if drafts else 1
            if seq.status is not finished:
                reason = None
                if samples:
                    tokens = seq.tokens
                    tokens += ids
                    num_valid = len(tokens) - 1  # tokens whose keys and values no later step overwrites
                    if drafts or not ids or ids[0] in seq.end_ids or num_valid >= seq.max_computed:
                        seq.num_computed -= 1 + len(drafts) - len(ids)
                        path = accepted_path(drafts, parents, ids) if drafts else []
                        ids, reason = _cut_at_end(seq, ids)
                        num_valid = len(tokens) - 1
                        if drafts:
                            self.draft_length.record(seq, len(drafts), path[: len(ids)])
                            self._moves += path_moves(seq, start, path, size)
                    if ids:
                        gained.append(seq)
                        gained_ids.append(ids)
                else:
                    num_valid = start + num_new
                if self._drafter_progress is not None:
                    self._drafter_progress.commit(seq)
                if num_valid // size > (num_hashed := seq.num_hashed):
                    self._running_set.register(seq, num_valid)
                    if self._drafter_progress is not None:
                        self._drafter_progress.index(seq, num_hashed)
                if reason is not None:
                    self.end(seq, reason, ids[-1] if reason is FinishReason.STOP else None)
                    outcome.finished.append(seq)
            if seq.status is not running:
                self._running_set.release_unplanned(seq)
            elif proposes:  # this row may have no drafts, and an earlier one rejected drafts
                self._running_set.trim(seq)
        for seq, end, slot in plan.state_saves:
            self.kv_cache.end_save(seq, end, slot, succeeded=True)
        return outcome

    def record_time(self, plan: StepPlan, duration_s: float) -> None:
        """Measure a step, which ended `duration_s` seconds after its launch or after the step before it."""
        if not plan.num_prefill_tokens and plan.catch_up is None:
            self.draft_length.record_step(plan.num_tokens, duration_s)
        self.budget.record(plan.num_tokens - plan.num_prefill_tokens, plan.num_prefill_tokens, duration_s)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """End the sequences of a step that raised an error, with finish_reason ERROR. Returns those that had not ended before.

        No block that the step wrote is reused.
        """
        self._pop_in_flight(plan)
        if plan.transfers:
            self.kv_cache.end_transfers(plan.transfers, succeeded=False)
        for seq in plan.sequences:
            self.kv_cache.poison(seq.blocks[seq.num_hashed :])
        self._fail_moves(plan)
        for seq, end, slot in plan.state_saves:
            self.kv_cache.end_save(seq, end, slot, succeeded=False)
        failed = [seq for seq in plan.sequences if seq.status is not Status.FINISHED]
        for seq, _ in plan.state_restores:  # admitted by this plan, perhaps without a row: its states were not restored
            if seq.status is not Status.FINISHED and seq not in failed:
                failed.append(seq)
                self.end(seq, FinishReason.ERROR)
        for seq, samples, drafts in zip(plan.sequences, plan.samples, plan.drafts, strict=True):
            seq.num_in_flight -= 1
            seq.num_pending -= samples * (1 + len(drafts))
            if seq.status is not Status.FINISHED:
                self.end(seq, FinishReason.ERROR)
            self._running_set.release_unplanned(seq)
        return failed

    def _fail_moves(self, plan: StepPlan) -> None:
        """Do not reuse blocks to which a failed step may not have moved keys and values. Other sequences that hold them are preempted."""
        blocks = {target // self.kv_cache.tokens_per_block for _, target in plan.moves}
        self.kv_cache.forget(blocks)
        for seq in self.running():
            if not blocks.isdisjoint(seq.blocks) and seq not in plan.sequences:
                self._running_set.preempt(seq)

    def _pop_in_flight(self, plan: StepPlan) -> None:
        """Remove the oldest plan in flight. Raises ValueError if it is not `plan`."""
        if not self._in_flight or self._in_flight[0] is not plan:
            raise ValueError("plans must be committed once each, in the order in which plan() returned them")
        self._in_flight.popleft()


def _cut_at_end(seq: Sequence, ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """(ids up to the one that ends the sequence, the finish reason), or all ids and None.

    `ids` are the newest tokens, which `seq.tokens` contains already; those after the end are removed from it.
    """
    num_before = len(seq.tokens) - len(ids)
    for num_tokens, token in enumerate(ids, num_before + 1):
        if token in seq.end_ids and num_tokens - seq.num_prompt > seq.min_tokens:
            reason = FinishReason.STOP
        elif num_tokens > seq.max_computed:
            reason = FinishReason.LENGTH
        else:
            continue
        del seq.tokens[num_tokens:]
        return ids[: num_tokens - num_before], reason
    return ids, None
