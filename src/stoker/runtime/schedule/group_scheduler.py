"""The scheduler of simulations: the Scheduler, whose decodes are a DecodeGroup instead of rows that are visited in every step."""

from __future__ import annotations

from stoker.base.types import FinishReason
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.partial_index import PartialIndexManager
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.decode_group import UNKNOWN_TOKEN, DecodeGroup
from stoker.runtime.schedule.plan import StepOutcome, StepPlan
from stoker.runtime.schedule.planner import Planner
from stoker.runtime.schedule.scheduler import Scheduler


class GroupPlan(StepPlan):
    """A plan whose lists contain prefills only. Its decodes are all sequences of the group.

    num_equal_steps: the number of steps that are planned. All have the same rows, each one token further than in the step before. Blocks
        that become full before the last one are indexed by `GroupScheduler.pass_steps`, or together with the commit.
    num_context_tokens: the sum of the first positions of all rows in the first step, that is, the tokens whose keys and values it reads.
    """

    __slots__ = ("num_context_tokens", "num_equal_steps")

    def __init__(self) -> None:
        super().__init__()
        self.num_context_tokens, self.num_equal_steps = 0, 1

    def __len__(self) -> int:
        """The number of rows."""
        return self.num_decodes + len(self.sequences)


class GroupPlanner(Planner):
    """Plans prefills and admissions as the Planner does."""

    group: DecodeGroup
    prefilling: dict[int, Sequence]  # running sequences that are not in the group, by seq_id, in the order of the running set

    def add_group(self, plan: StepPlan) -> None:
        """Add all sequences of the group to a plan."""
        group = self.group
        if group.growing:
            group.grow()
        plan.num_decodes = plan.num_tokens = group.num_rows

    def _decodes(self, plan: StepPlan) -> tuple[list[Sequence], bool]:
        self.add_group(plan)
        return list(self.prefilling.values()), False


class GroupScheduler(Scheduler):
    """Equal to a Scheduler with the policy guaranteed_no_evict, one step in flight, and requests that end at max_tokens.

    max_num_tokens is at least max_batch_size, so that all running sequences fit into a step. Requests are not cancelled and have no
    deadlines, grammars or adapters.
    """

    plan_type = GroupPlan
    planner_type = GroupPlanner
    _planner: GroupPlanner

    def __init__(
        self,
        *,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        target_itl_s: float | None,
        target_ttft_s: float | None,
        prefix_reuse: bool,
        event_log: BlockEventLog,
        stops_at_blocks: bool = False,
        index_answers: bool = True,
    ) -> None:
        """`stops_at_blocks`: plan no step beyond one in which a block becomes full, because others read or allocate blocks meanwhile.

        `index_answers`: prompts may contain answers of earlier ones. Otherwise only the blocks in `Sequence.packed_blocks` are indexed.
        """
        if prefix_reuse and not index_answers:
            self.kv_cache_type = PartialIndexManager
        super().__init__(
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            target_itl_s=target_itl_s,
            target_ttft_s=target_ttft_s,
            prefix_reuse=prefix_reuse,
            event_log=event_log,
        )
        self._event_log, self._stops_at_blocks = event_log, stops_at_blocks
        self._has_target = self.budget.has_target
        self._group = self._planner.group = DecodeGroup(self._running_set, index_answers)
        self._prefilling = self._planner.prefilling = dict[int, Sequence]()
        self._decodes = GroupPlan()  # the plan of steps that only decode

    def plan_steps(self, now: float) -> GroupPlan:
        """Plan the next steps at the time `now`: several ones if they only decode. The plan is empty if there is nothing to compute.

        It may be changed by the next call.
        """
        group = self._group
        if self._prefilling or len(self._running_set.queue):
            plan = self.plan(now)
            assert isinstance(plan, GroupPlan)
        else:  # faster: nothing can be admitted
            plan = self._decodes
            self._planner.add_group(plan)
            if plan.num_decodes:
                self._in_flight.append(plan)
        plan.num_context_tokens = group.num_context_tokens
        if plan.sequences:
            plan.num_context_tokens += sum(plan.starts)
            for seq in plan.sequences:
                self._prefilling[seq.seq_id] = seq
        elif self._has_target or (self._stops_at_blocks and len(self._event_log)):  # evictions are reported after one step
            plan.num_equal_steps = 1
        else:
            plan.num_equal_steps = group.num_equal_steps
            if self._stops_at_blocks and 0 < (num_steps := group.num_steps_to_fill) < plan.num_equal_steps:
                plan.num_equal_steps = num_steps
        return plan

    def num_steps_to_events(self, num_steps: int) -> int:
        """The number of planned steps after which evictions are reported, if that is before the last of `num_steps` steps; otherwise 0.

        A block is evicted when a step is planned that writes to a new one, and its eviction is reported when this step has ended.
        """
        if len(self._event_log):
            return int(num_steps > 1)
        count = self._group.num_steps_to_fill + 1
        return count if 1 < count < num_steps and self.kv_cache.evicts_entries(self._max_growth(num_steps)) else 0

    def _max_growth(self, num_steps: int) -> int:
        """The blocks that follow those which `num_steps` steps fill, at most."""
        return self._group.num_rows * (1 + num_steps // self.kv_cache.tokens_per_block)

    def pass_steps(self, num_steps: int) -> None:
        """The first `num_steps` of the planned steps have ended: index the blocks that were full when the last one of them was planned."""
        self._group.fill_blocks(num_steps - 1)
        self._group.grow()

    def commit_steps(self, plan: GroupPlan, num_steps: int) -> StepOutcome:
        """Commit the first `num_steps` of the planned steps; the others are not computed.

        The outcome lists the sequences that received their first token, and those that ended.
        """
        ended = self._group.commit(num_steps)
        for seq in ended:
            self.end(seq, FinishReason.LENGTH)
        if not plan.sequences:  # faster
            self._pop_in_flight(plan)
            outcome = StepOutcome()
            outcome.finished = ended
            return outcome
        outcome = self.commit(plan, [[UNKNOWN_TOKEN] if samples else [] for samples in plan.samples])
        for seq in outcome.sequences:
            del self._prefilling[seq.seq_id]
            if seq.finish_reason is None:
                self._group.join(seq)
        outcome.finished[:0] = ended
        return outcome
