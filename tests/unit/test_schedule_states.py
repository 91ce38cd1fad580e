"""The schedule of models with recurrent states: every row continues from the state of its own tokens, and prefixes are reused."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.base.types import SamplingParams
from stoker.runtime.kv.snapshots import StateSnapshots
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from unit.test_schedule_property import configs, drive, stub_proposers, workloads

__all__ = ["stub_proposers"]  # a fixture of this module, too


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads(), st.integers(1, 12))
def test_random_workloads_continue_from_their_own_states(config: dict, workload: dict, num_snapshots: int) -> None:
    drive(config, workload | {"num_snapshots": num_snapshots, "p_nothing": 0.0, "host_blocks": 0})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads(max_requests=20), st.integers(0, 3), st.integers(1, 12))
def test_preempted_sequences_continue_from_a_snapshot_or_from_the_start(config: dict, workload: dict, slack: int, number: int) -> None:
    config = config | {"policy": "max_utilization", "max_batch_size": 5, "max_num_sequences": None, "max_seq_len": 33}
    config["num_blocks"] = -(-32 // config["tokens_per_block"]) + slack
    drive(config, workload | {"num_snapshots": number, "p_nothing": 0.0, "host_blocks": 0})


class Run:
    """A scheduler with blocks of four tokens, whose steps are committed at once. The model samples token 50."""

    def __init__(self, num_snapshots: int = 8) -> None:
        self.snapshots = StateSnapshots(10, num_snapshots)
        self.scheduler = Scheduler(
            num_blocks=40, tokens_per_block=4, max_batch_size=4, max_num_tokens=64, max_seq_len=60, snapshots=self.snapshots
        )
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int = 1) -> Sequence:
        request = TokenRequest(request_id=str(self.count), prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(seq := Sequence(self.count, request, 0, 0.0))
        self.count += 1
        return seq

    def steps(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work:
            plans.append(plan := self.scheduler.plan(0.0))
            self.scheduler.commit(plan, [[50] if samples else [] for samples in plan.samples])
        return plans


def test_a_prompt_is_saved_after_its_last_full_block_and_reused_from_there() -> None:
    run = Run()
    run.add(list(range(11)))
    first, last = run.steps()
    assert first.num_new == [8] and [end for _, end, _ in first.state_saves] == [8]
    assert last.num_new == [3] and not last.state_saves
    again = run.add([*range(8), 20, 21])
    (plan,) = run.steps()
    assert plan.starts == [8] and plan.state_restores == [(again, first.state_saves[0][2])] and again.num_cached == 8


def test_where_prompts_differ_a_snapshot_is_taken_for_the_third() -> None:
    run = Run()
    run.add(list(range(15)))
    run.steps()
    second = run.add([*range(8), *range(20, 27)])  # shares two blocks, after which there is no snapshot
    assert [plan.starts for plan in run.steps()] == [[0], [8], [12]] and second.num_cached == 0
    third = run.add([*range(8), 30, 31, 32])
    assert [plan.starts for plan in run.steps()] == [[8]] and third.num_cached == 8


def test_requests_that_arrive_together_share_what_the_first_computes() -> None:
    run = Run()
    sequences = [run.add([*range(8), 20 + i, 21, 22]) for i in range(3)]
    plans = run.steps()
    assert [plan.starts for plan in plans] == [[0], [8, 8, 8]] and [seq.num_cached for seq in sequences] == [0, 8, 8]


def test_a_decode_replaces_its_own_snapshot_and_the_next_turn_continues_from_the_answer() -> None:
    run = Run(num_snapshots=2)
    seq = run.add([1, 2, 3, 4, 5], max_tokens=12)
    run.steps()
    assert len(run.snapshots) == 2, "the prompt's block, and the newest block of the answer"
    turn = run.add([*seq.tokens, 7, 8])
    run.steps()
    assert turn.num_cached == 16


def test_cancelled_and_failed_sequences_leave_no_slot_reserved() -> None:
    run = Run(num_snapshots=2)
    seq = run.add(list(range(9)), max_tokens=4)
    plan = run.scheduler.plan(0.0)
    assert len(plan.state_saves) == 1
    run.scheduler.cancel(seq.request_id)
    run.scheduler.commit(plan, [[]])
    assert run.snapshots.num_free == 2 and run.scheduler.num_running == 0
    run.add(list(range(9)), max_tokens=4)
    run.scheduler.fail(run.scheduler.plan(0.0))
    assert run.snapshots.num_free == 2 and run.scheduler.num_running == 0


def test_a_failed_step_ends_the_sequences_whose_states_it_restored() -> None:
    run = Run()
    run.add(list(range(9)))
    run.steps()
    seq = run.add([*range(8), 20])
    plan = run.scheduler.plan(0.0)
    assert plan.state_restores
    assert run.scheduler.fail(plan) == [seq]
    retried = run.add([*range(8), 20])
    run.steps()
    assert retried.num_cached == 8, "the snapshot itself is intact"
