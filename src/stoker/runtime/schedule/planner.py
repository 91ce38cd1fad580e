"""Fills a step plan: decodes, then unfinished prefills, then admissions, then draft tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from stoker.base.draft_tree import DraftTree, DynamicTree, chain_length
from stoker.runtime.request import NO_ADAPTER, Sequence, Status
from stoker.runtime.schedule.draft_length import DraftLength
from stoker.runtime.schedule.drafter_progress import DrafterProgress
from stoker.runtime.schedule.plan import NO_DRAFTS, StepPlan
from stoker.runtime.schedule.policies.policy import Demand
from stoker.runtime.schedule.proposers.proposer import Proposer
from stoker.runtime.schedule.running_set import RunningSet
from stoker.runtime.schedule.step_budget import StepBudget

TREE_PERIOD = 1024  # positions that share a key mean (`kernels.types.MEAN_TOKENS`): the keys of a tree are within one of these parts
_MIN_SAMPLED, _MAX_SAMPLED = 64, 128  # tokens of a step with drafts; a device computes more at the cost of as many plain rows


class Planner:
    """Fills plans of at most `max_rows` rows and `budget.max_num_tokens` tokens from the running set; max_rows <= max_num_tokens."""

    def __init__(
        self,
        running_set: RunningSet,
        proposer: Proposer,
        *,
        max_rows: int,
        budget: StepBudget,
        chunked_prefill: bool,
        draft_length: DraftLength,
        drafts_beside_prefill: bool = True,
        drafter_progress: DrafterProgress | None = None,
        tree: DraftTree | DynamicTree | None = None,
        pads_prefills: bool = False,
    ) -> None:
        """`draft_length`: the number of drafts per row. `drafts_beside_prefill`: whether steps with prefills have drafts, too.

        `drafter_progress`: of a drafter that can catch up. None: a drafter on the device runs in every step. `tree`: the form of the drafts
        of each row; None: a chain. `pads_prefills`: prefills are padded to the longest one of the step.
        """
        self._running_set = running_set
        self._proposer = proposer
        self._draft_length = draft_length
        self._max_drafts = draft_length.max_drafts
        self._num_decodes = 0  # of the newest plan
        self._drafts_ahead = False  # whether the step that is planned may verify drafts of sequences with pending ids
        self._max_sampled = max_sampled_tokens(max_rows)
        self._drafts_beside_prefill = drafts_beside_prefill
        self._drafter_progress = drafter_progress
        self._tree, self._pads_prefills = tree, pads_prefills
        self._row_limit = self._max_rows = max_rows
        self._budget, self._max_num_tokens = budget, budget.max_num_tokens
        self._token_limit = self._max_num_tokens  # of the step that is planned, for prefills
        self._chunked_prefill = chunked_prefill

    def limit_rows(self, count: int) -> None:
        """Limit plans to at most `count` rows per step from now on. The limit is between 1 and the original max_rows."""
        self._max_rows = max(min(count, self._row_limit), 1)

    def fill(self, plan: StepPlan, now: float, *, paused: bool) -> None:
        """Fill the plan of one step, and advance the counters of its sequences.

        With `paused`, only sequences that were preempted are admitted. `now` is in monotonic seconds.
        """
        if self._expects_drafts():
            return
        num_holding = self._running_set.num_holding
        prefills, starved = self._decodes(plan)
        if self._budget.has_target:
            self._limit_tokens(plan, prefills, now)
        if self._prefills(plan, prefills) and not starved and not self._running_set.admission_blocked:
            self._admissions(plan, num_holding, now, paused)
        if starved and not plan.sequences and not self._running_set.num_leaving:
            # Every selected sequence was preempted. The running set is smaller now, so the recursion ends.
            self.fill(plan, now, paused=paused)
        elif self._max_drafts and plan.num_decodes and not starved and (self._drafts_beside_prefill or not plan.num_prefill_tokens):
            self._add_drafts(plan)
        if self._proposer.runs_on_device and plan.sequences:
            self._plan_drafter(plan)
        if self._running_set.num_with_adapter:
            self._add_adapters(plan)

    def _decodes(self, plan: StepPlan) -> tuple[list[Sequence], bool]:
        """Add the decodes to the plan. Returns (sequences whose prefill is not complete, whether a decode must wait for a block)."""
        sequences, starts = plan.sequences, plan.starts
        prefills: list[Sequence] = []
        starved = False
        size, has_snapshots = self._running_set.kv_cache.tokens_per_block, self._running_set.kv_cache.snapshots is not None
        running = Status.RUNNING
        for seq in self._select():
            start = seq.num_computed
            if start < seq.num_prefill:
                prefills.append(seq)
                continue
            if start == seq.max_computed or (seq.num_pending and self._waits(seq)) or seq.status is not running:
                continue
            if not start % size and start == len(seq.blocks) * size and not self._running_set.grow(seq):
                starved = True
                continue
            sequences.append(seq)
            starts.append(start)
            seq.num_computed = start + 1
            seq.num_pending += 1
            seq.num_in_flight += 1
            if has_snapshots and not (start + 1) % size and seq.num_pending <= seq.num_in_flight:
                self._add_save(plan, seq, start + 1)
        plan.num_decodes = plan.num_tokens = len(sequences)
        plan.num_new = [1] * len(sequences)
        plan.samples = [True] * len(sequences)
        plan.drafts = [NO_DRAFTS] * len(sequences)
        plan.parents = [NO_DRAFTS] * len(sequences)
        return prefills, starved

    def _select(self) -> Iterable[Sequence]:
        """The running sequences that may compute in this step, at most max_rows.

        If there are more, the selected ones become the last of the running set. A prompt that cannot be chunked keeps its position until
        the step has room for it after the sequences before it.
        """
        running = self._running_set.running
        if len(running) <= self._max_rows:
            return list(running.values())
        selected, room = [], self._max_num_tokens
        for seq in running.values():
            if seq.num_computed != seq.max_computed and not (seq.num_pending and self._waits(seq)) and self._min_tokens(seq) <= room:
                selected.append(seq)
                room -= self._min_tokens(seq)
                if len(selected) == self._max_rows:
                    break
        for seq in selected:
            running[seq.seq_id] = running.pop(seq.seq_id)
        return selected

    def _expects_drafts(self) -> bool:
        """Whether a running sequence has a pending id after which drafts are likely.

        Then no step is planned before the id is known, unless the device finds the drafts of all running sequences by itself. A step of the
        other sequences would separate them from this one in all later steps, which would read the weights twice as often.
        """
        if not self._max_drafts or not self._proposer.reads_token_ids:
            return False
        self._drafts_ahead = all(map(self._is_ahead, self._running_set.running.values()))
        return not self._drafts_ahead and any(
            seq.num_pending and not seq.waits_for_ids and self._limit(seq) > 0 and self._proposer.waits(seq)
            for seq in self._running_set.running.values()
        )

    def _is_ahead(self, seq: Sequence) -> bool:
        """Whether a step with drafts of `seq` can be planned while ids are pending: no drafter must catch up with tokens before them."""
        if not seq.drafts_ahead or self._drafter_progress is None:
            return seq.drafts_ahead
        return self._drafter_progress.is_complete(seq, seq.num_computed) or not self._limit(seq)

    def _waits(self, seq: Sequence) -> bool:
        """Whether a sequence with pending ids waits for them: it reads them on the host, or its position depends on accepted drafts.

        The device corrects the position of a sequence that drafts ahead.
        """
        if seq.waits_for_ids or not self._proposer.reads_token_ids or seq.drafts_ahead:
            return seq.waits_for_ids
        return seq.num_pending > seq.num_in_flight

    def _limit(self, seq: Sequence) -> int:
        """The number of drafts that pay for `seq`, if a step has as many decodes as the newest one."""
        if self._num_decodes >= self._max_sampled:
            return 0
        return self._draft_length.limit(seq, max(self._num_decodes, 1))

    def _plan_drafter(self, plan: StepPlan) -> None:
        """Set how many drafts the drafter computes in this step for the next one, and what it computes before."""
        limits = [self._limit(seq) for seq in plan.sequences]
        if self._drafter_progress is None or any(limits):
            if self._drafter_progress is not None:
                self._drafter_progress.add(plan, limits)
            plan.num_wanted = max((limit for limit, samples in zip(limits, plan.samples, strict=True) if samples), default=0)
        for seq in plan.sequences:
            seq.num_drafted = plan.num_wanted or 0

    def _limit_tokens(self, plan: StepPlan, prefills: list[Sequence], now: float) -> None:
        """Set the limit of the tokens of this step from the latency targets. The plan has its decodes; `prefills` are not complete."""
        running_set = self._running_set
        num_decoding = len(running_set.running) - len(prefills)
        if not num_decoding:
            self._token_limit = self._max_num_tokens
            return
        num_waiting = sum(seq.num_prefill - seq.num_computed for seq in prefills) + running_set.queue.num_tokens
        first = prefills[0] if prefills else running_set.queue.peek()
        arrival = first.arrival if first is not None else None
        self._token_limit = self._budget.num_tokens(plan.num_decodes, num_decoding, num_waiting, arrival, now)

    def _prefills(self, plan: StepPlan, prefills: list[Sequence]) -> bool:
        """Add chunks of unfinished prefills to the plan. False if one of them gets no tokens; then no waiting sequence may overtake it."""
        for seq in prefills:
            if seq.status is Status.RUNNING:  # a decode may have preempted it
                num_new = self._num_new(plan, seq, seq.num_computed, self._token_limit - plan.num_tokens)
                if not num_new:
                    return False
                self._add_prefill(plan, seq, num_new)
        return True

    def _admissions(self, plan: StepPlan, num_holding: int, now: float, paused: bool) -> None:
        """Admit waiting sequences in order until one does not fit.

        A sequence whose next block is being computed by another one is parked until that block is indexed. `num_holding` is the number of
        sequences that held blocks when planning began.
        """
        running_set = self._running_set
        policy, queue, kv_cache, budget = running_set.policy, running_set.queue, running_set.kv_cache, self._budget
        while running_set.has_free_row and (seq := queue.peek(preempted_only=paused)) is not None:
            match = kv_cache.match(seq)
            start = match.num_reused * kv_cache.tokens_per_block
            if budget.has_target and budget.is_late(seq, len(seq.tokens) - start, now) and queue.postpone(seq, budget.delay_s):
                continue
            if match.producer is not None and not policy.whole_batches:
                num_common = kv_cache.num_common_blocks(seq, match.producer)
                kv_cache.request_snapshot(match.producer, num_common)
                queue.park(seq, match.producer, num_common)
                continue
            if len(plan.state_restores) == self._max_rows:  # the buffer of a step has room for one copy per row
                return
            all_rows_taken = len(plan) == self._max_rows
            room = 0 if all_rows_taken else max(self._token_limit - plan.num_tokens, 0)
            num_new = self._num_new(plan, seq, start, room)
            # If all rows are taken, a sequence may still get blocks and alternate with the others in later steps.
            if not num_new and not all_rows_taken and not policy.whole_batches:
                return
            demand = Demand(match.num_blocks_now, match.num_blocks_later, match.num_free, kv_cache.num_reserved, num_holding)
            if not policy.admits(demand):
                running_set.admission_blocked = True
                return
            if not num_new:
                match.host_blocks = ()  # a failed step ends its rows only, so what it loads must belong to one of them
            running_set.admit(seq, match, now)
            if self._drafter_progress is not None:
                self._drafter_progress.admit(seq)
            if match.state_slot >= 0:
                plan.state_restores.append((seq, match.state_slot))
            if num_new:
                self._add_prefill(plan, seq, num_new)

    def _up_to_snapshot(self, seq: Sequence, start: int, num_new: int) -> int:
        """At most `num_new` tokens from position `start` on, up to where the states of `seq` are saved, or up to the end of a block."""
        size = self._running_set.kv_cache.tokens_per_block
        end = min([start + num_new, *(at for at in seq.snapshot_at if at > start)])
        if end < len(seq.tokens) and end // size * size > start:
            end = end // size * size
        return end - start

    def _add_prefill(self, plan: StepPlan, seq: Sequence, num_new: int) -> None:
        """Add a row with a chunk of a prefill, whose states are saved if it ends at the end of a block."""
        _add_prefill(plan, seq, num_new)
        kv_cache = self._running_set.kv_cache
        if kv_cache.snapshots is not None and not seq.num_computed % kv_cache.tokens_per_block:
            self._add_save(plan, seq, seq.num_computed)

    def _add_save(self, plan: StepPlan, seq: Sequence, end: int) -> None:
        """Save the states of `seq` after `end` tokens, where a block ends, if there is a slot for a snapshot."""
        slot = self._running_set.kv_cache.plan_save(seq, end)
        if slot >= 0:
            plan.state_saves.append((seq, end, slot))

    def _add_drafts(self, plan: StepPlan) -> None:
        """Add draft tokens to decodes, as far as the step has tokens left, `max_sampled_tokens` allows, and blocks are free.

        Drafts come after prefills and admissions and never preempt, so they delay no other sequence. Rows with drafts are moved behind the
        rows with one token.
        """
        room, self._num_decodes = self._max_sampled - len(plan), plan.num_decodes
        if room <= 0:
            return
        drafts: list[Seq[int]] = []
        for seq in plan.sequences[: plan.num_decodes]:
            drafts.append(self._propose(seq, plan, room))
            room -= len(drafts[-1])
        if not any(drafts):
            return
        order = sorted(range(plan.num_decodes), key=lambda row: bool(drafts[row]))  # stable
        plan.sequences[: plan.num_decodes] = [plan.sequences[row] for row in order]
        plan.starts[: plan.num_decodes] = [plan.starts[row] for row in order]
        plan.drafts[: plan.num_decodes] = [drafts[row] for row in order]
        plan.parents[: plan.num_decodes] = [self._parents(plan.sequences[i], len(drafts[row])) for i, row in enumerate(order)]
        plan.num_new[: plan.num_decodes] = [1 + len(drafts[row]) for row in order]
        plan.num_decodes = sum(not ids for ids in drafts)

    def _propose(self, seq: Sequence, plan: StepPlan, room: int) -> Seq[int]:
        """At most `room` draft tokens for one decode of the plan. Advances the counters and blocks of the sequence past them."""
        max_tokens = self._token_limit if plan.num_prefill_tokens else self._max_num_tokens
        limit = min(self._limit(seq), room, max_tokens - plan.num_tokens, seq.max_computed - seq.num_computed)
        is_pending = self._proposer.reads_token_ids and seq.num_pending > 1
        is_unknown = not self._drafts_ahead if is_pending else seq.reads_drafts and not self._proposer.reads_token_ids
        if limit <= 0 or is_unknown or seq.status is not Status.RUNNING:
            return NO_DRAFTS
        if self._drafter_progress is not None and not self._drafter_progress.is_complete(seq, seq.num_computed - 1):
            return NO_DRAFTS  # the drafts of the newest step lacked tokens before them
        drafts = [-1] * self._proposer.num_ahead(seq, limit) if is_pending else self._proposer.propose(seq, limit)
        kv_cache = self._running_set.kv_cache
        while len(seq.blocks) * kv_cache.tokens_per_block < seq.num_computed + len(drafts) and kv_cache.grow(seq):
            pass
        drafts = drafts[: len(seq.blocks) * kv_cache.tokens_per_block - seq.num_computed]
        if self._tree is not None and _needs_chain(seq, len(drafts)):
            drafts = drafts[: chain_length(self._parents(seq, len(drafts)))]
        if drafts and kv_cache.snapshots is not None and seq.num_pending <= seq.num_in_flight:
            end = -(-seq.num_computed // kv_cache.tokens_per_block) * kv_cache.tokens_per_block
            if seq.num_computed < end <= seq.num_computed + len(drafts):  # dropped at the commit if a draft before it is rejected
                self._add_save(plan, seq, end)
        seq.num_computed += len(drafts)
        seq.num_pending += len(drafts)
        plan.num_tokens += len(drafts)
        return drafts

    def _parents(self, seq: Sequence, count: int) -> Seq[int]:
        """The parents of the first `count` drafts of a sequence."""
        if not count:
            return NO_DRAFTS
        return range(count) if self._tree is None else self._tree.parents_of(seq.proposal, count)

    def _add_adapters(self, plan: StepPlan) -> None:
        """Set `plan.adapters` if any row has an adapter."""
        adapters = [seq.adapter for seq in plan.sequences]
        if any(adapter != NO_ADAPTER for adapter in adapters):
            plan.adapters = adapters

    def _min_tokens(self, seq: Sequence) -> int:
        """The smallest number of tokens that a step which contains `seq` computes for it."""
        return 1 if self._chunked_prefill else max(seq.num_prompt - seq.num_computed, 1)

    def _num_new(self, plan: StepPlan, seq: Sequence, start: int, budget: int) -> int:
        """The number of tokens from position `start` on that are computed in this step, of at most `budget`.

        Without chunked prefill the prompt is computed in one step. Tokens that were generated before a preemption may follow in other
        steps, because prompt and generated tokens together can exceed max_num_tokens.
        """
        num_left = len(seq.tokens) - start
        if self._pads_prefills:
            budget = min(budget, self._unpadded_room(plan))
        if self._running_set.kv_cache.snapshots is not None and self._chunked_prefill:
            return self._up_to_snapshot(seq, start, min(num_left, budget))
        if num_left <= budget:
            return num_left
        return budget if self._chunked_prefill or seq.num_prompt - start <= budget else 0

    def _unpadded_room(self, plan: StepPlan) -> int:
        """The tokens of one more prefill with which the prefills of the plan, padded to the longest one, have max_num_tokens places.

        The ops of recurrent states pad them. Without this limit, 40 prompts of 200 tokens beside one of 7,800 would have 39 times as many
        places as tokens.
        """
        lengths = plan.num_new[plan.num_decodes :]
        room = self._max_num_tokens // (len(lengths) + 1)
        return room if room >= max(lengths, default=0) else 0


def max_sampled_tokens(max_rows: int) -> int:
    """The largest number of tokens that a step with drafts samples. It bounds the memory of their logits."""
    return min(max(max_rows, _MIN_SAMPLED), _MAX_SAMPLED)


def _needs_chain(seq: Sequence, num_drafts: int) -> bool:
    """Whether the next drafts of `seq` must be a chain: if the nodes of a tree would lie in two parts of TREE_PERIOD positions, or if the
    grammar of a branch may lower the minimum length of the sequence."""
    newest = seq.num_computed - 1
    return newest // TREE_PERIOD != (newest + num_drafts) // TREE_PERIOD or (seq.params.guide is not None and seq.params.min_tokens > 0)


def _add_prefill(plan: StepPlan, seq: Sequence, num_new: int) -> None:
    """Add a row with a chunk of a prefill. The last chunk samples the token that follows."""
    samples = seq.num_computed + num_new == seq.num_prefill
    plan.sequences.append(seq)
    plan.starts.append(seq.num_computed)
    plan.num_new.append(num_new)
    plan.samples.append(samples)
    plan.drafts.append(NO_DRAFTS)
    plan.parents.append(NO_DRAFTS)
    plan.num_tokens += num_new
    plan.num_prefill_tokens += num_new
    seq.num_computed += num_new
    seq.num_pending += samples
    seq.num_in_flight += 1
