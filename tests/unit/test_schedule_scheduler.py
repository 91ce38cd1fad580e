"""The rules of the scheduler, one per test."""

from __future__ import annotations

import random

import pytest

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError, RequestError
from stoker.base.types import AdmissionRecord, FinishReason, Guide, SamplingParams
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.scheduler import Scheduler


def scheduler(**changes: object) -> Scheduler:
    config = {"num_blocks": 64, "tokens_per_block": 4, "max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64} | changes
    return Scheduler(**config)  # type: ignore[arg-type]


class Feed:
    """Adds requests and numbers their sequences."""

    def __init__(self, target: Scheduler) -> None:
        self.target = target
        self.count = 0

    def __call__(self, prompt: list[int], *, n: int = 1, arrival: float = 0.0, **fields: object) -> list[Sequence]:
        names = set(fields) & {"priority", "timeout_s", "end_ids", "cache_salt"}
        params = SamplingParams(n=n, **{k: v for k, v in fields.items() if k not in names})  # type: ignore[arg-type]
        request = TokenRequest(request_id=f"r{self.count}", prompt_ids=prompt, params=params, **{k: fields[k] for k in names})  # type: ignore[arg-type]
        self.target.check(request)
        sequences = [Sequence(self.count * 100 + i, request, i, arrival) for i in range(n)]
        for seq in sequences:
            self.target.add(seq)
        self.count += 1
        return sequences


def step(target: Scheduler, token: int = 9, now: float = 0.0) -> StepPlan:
    """Plan and commit, each row sampling `token`."""
    plan = target.plan(now)
    if plan.sequences:
        target.commit(plan, [[token]] * len(plan))
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(seq.seq_id, *row) for seq, row in zip(plan.sequences, zip(plan.starts, plan.num_new, plan.samples, strict=True), strict=True)]


def test_a_long_prompt_is_chunked_and_decodes_come_first() -> None:
    target = scheduler(max_num_tokens=6)
    feed = Feed(target)
    feed([1] * 3)
    assert rows(step(target)) == [(0, 0, 3, True)]
    feed([2] * 12)
    plans = [step(target) for _ in range(4)]
    assert rows(plans[0]) == [(0, 3, 1, True), (100, 0, 5, False)]
    assert rows(plans[1]) == [(0, 4, 1, True), (100, 5, 5, False)]
    assert rows(plans[2]) == [(0, 5, 1, True), (100, 10, 2, True)]
    assert rows(plans[3]) == [(0, 6, 1, True), (100, 12, 1, True)]
    assert [plan.num_decodes for plan in plans] == [1, 1, 1, 2]


def test_without_chunked_prefill_a_prompt_waits_and_is_not_overtaken() -> None:
    target = scheduler(max_num_tokens=6, chunked_prefill=False)
    feed = Feed(target)
    feed([1] * 3, max_tokens=3)
    step(target)
    feed([2] * 6)
    feed([3] * 2)
    assert [rows(step(target)) for _ in range(3)] == [[(0, 3, 1, True)], [(0, 4, 1, True)], [(100, 0, 6, True)]]


def test_steps_are_planned_before_earlier_ids_are_known() -> None:
    target = scheduler()
    (seq,) = Feed(target)([1] * 3, max_tokens=3)
    plans = [target.plan(0.0) for _ in range(4)]
    assert [rows(plan) for plan in plans] == [[(0, 0, 3, True)], [(0, 3, 1, True)], [(0, 4, 1, True)], []]
    assert (seq.num_pending, len(seq.tokens), target.num_in_flight) == (3, 3, 3)
    for token, plan in enumerate(plans[:3]):
        outcome = target.commit(plan, [[token]])
        assert outcome.token_ids == [[token]] and outcome.sequences == [seq]
    assert (seq.tokens, seq.finish_reason) == ([1, 1, 1, 0, 1, 2], FinishReason.LENGTH)
    assert not target.has_work and target.kv_cache.pool.num_free == 64


def test_an_ended_sequence_holds_its_blocks_while_a_step_contains_it() -> None:
    target = scheduler()
    (seq,) = Feed(target)([1] * 3, end_ids=(7,))
    first, second = target.plan(0.0), target.plan(0.0)
    outcome = target.commit(first, [[7]])
    assert (outcome.finished, seq.finish_reason, seq.stop_id) == ([seq], FinishReason.STOP, 7)
    assert target.num_running == 1 and target.kv_cache.pool.num_free < 64
    late = target.commit(second, [[5]])
    assert not late.sequences and not late.finished and seq.tokens == [1, 1, 1, 7]
    assert target.num_running == 0 and target.kv_cache.pool.num_free == 64


def test_an_end_id_before_min_tokens_does_not_end_the_sequence() -> None:
    target = scheduler()
    (seq,) = Feed(target)([1], end_ids=(7,), min_tokens=2, max_tokens=9)
    for _ in range(3):
        step(target, 7)
    assert seq.tokens == [1, 7, 7, 7] and seq.finish_reason is FinishReason.STOP


def test_the_engine_limit_lowers_max_tokens() -> None:
    target = scheduler(max_seq_len=8)
    (seq,) = Feed(target)([1] * 6, max_tokens=50)
    while target.has_work:
        step(target)
    assert len(seq.tokens) == 8 and seq.finish_reason is FinishReason.LENGTH


def test_a_guided_sequence_is_not_planned_while_an_id_is_pending() -> None:
    target = scheduler()
    Feed(target)([1] * 3, guide=Guide("json"))
    first = target.plan(0.0)
    assert not target.plan(0.0).sequences
    target.commit(first, [[4]])
    assert len(target.plan(0.0)) == 1


def test_cancel_frees_blocks_immediately_if_no_step_is_in_flight() -> None:
    target = scheduler()
    feed = Feed(target)
    one, waiting = feed([1] * 9), feed([2] * 40, n=2)
    step(target)
    assert target.request_ids() == ["r0", "r1"] and "r1" in target
    assert target.cancel("r0") == one and target.cancel("r1") == waiting and target.cancel("r0") == target.cancel("unknown") == []
    assert target.kv_cache.pool.num_free == 64 and target.num_waiting == 0 and not target.has_work and target.request_ids() == []
    assert {seq.finish_reason for seq in one + waiting} == {FinishReason.CANCELLED}


def test_cancel_of_one_index_does_not_end_its_siblings() -> None:
    target = scheduler()
    seqs = Feed(target)([1] * 3, n=3)
    assert target.cancel("r0", 1) == [seqs[1]]
    step(target)
    assert [seq.status for seq in seqs] == [Status.RUNNING, Status.FINISHED, Status.RUNNING]


def test_deadlines_end_waiting_and_running_sequences() -> None:
    target = scheduler(max_batch_size=1)
    feed = Feed(target)
    seqs = [*feed([1] * 3, timeout_s=5.0), *feed([2] * 3, timeout_s=3.0), *feed([3] * 3)]
    step(target)
    assert target.next_deadline == 3.0 and target.expire(2.9) == []
    assert target.expire(3.0) == [seqs[1]] and target.expire(4.0) == []
    assert target.expire(9.0) == [seqs[0]] and seqs[0].finish_reason is FinishReason.DEADLINE
    assert target.next_deadline == float("inf") and rows(step(target)) == [(200, 0, 3, True)]


def test_a_failed_step_ends_its_rows_and_its_blocks_are_not_reused() -> None:
    target = scheduler()
    feed = Feed(target)
    (bad,) = feed([1] * 9)
    assert target.fail(target.plan(0.0)) == [bad]
    assert bad.finish_reason is FinishReason.ERROR and target.kv_cache.pool.num_free == 64
    (good,) = feed([1] * 9)
    step(target)
    assert good.num_cached == 0 and len(good.tokens) == 10


def test_pause_admits_no_new_sequences_and_running_ones_continue() -> None:
    target = scheduler()
    feed = Feed(target)
    feed([1] * 3, max_tokens=2)
    step(target)
    feed([2] * 3)
    target.pause(True)
    assert rows(step(target)) == [(0, 3, 1, True)]
    assert not target.plan(0.0).sequences and not target.has_work and target.num_waiting == 1
    target.pause(False)
    assert target.has_work and rows(step(target)) == [(100, 0, 3, True)]


def test_a_preempted_sequence_resumes_while_admission_is_paused() -> None:
    target = scheduler(num_blocks=6, policy="max_utilization")
    feed = Feed(target)
    one, two = *feed([1] * 7, max_tokens=12), *feed([2] * 5, max_tokens=12)
    step(target)
    feed([3] * 3, max_tokens=1)
    target.pause(True)
    while target.has_work:
        step(target)
    assert target.num_preemptions > 0 and len(one.tokens) == 19 and len(two.tokens) == 17 and target.num_waiting == 1


def test_siblings_wait_for_the_first_and_share_its_prompt() -> None:
    target = scheduler()
    seqs = Feed(target)(list(range(13)), n=3)
    assert rows(step(target)) == [(0, 0, 13, True)]
    assert rows(step(target)) == [(0, 13, 1, True), (1, 12, 1, True), (2, 12, 1, True)]
    assert seqs[0].blocks[:3] == seqs[1].blocks[:3] == seqs[2].blocks[:3]
    assert len({seq.blocks[3] for seq in seqs}) == 3
    assert target.num_reused_tokens == 24


def test_a_common_prefix_is_computed_once() -> None:
    target = scheduler(num_blocks=512, max_batch_size=64, max_num_tokens=512, max_seq_len=512, tokens_per_block=16)
    feed = Feed(target)
    for i in range(64):
        feed([*range(400), 1000 + i])
    assert rows(step(target)) == [(0, 0, 401, True)]
    plan = step(target)
    assert len(plan) == 64 and plan.num_tokens == 64


def test_a_parked_sequence_waits_only_for_the_blocks_that_it_shares() -> None:
    target = scheduler(max_num_tokens=8, num_blocks=32, max_seq_len=100)
    feed = Feed(target)
    feed([1] * 8 + [2] * 40)
    feed([1] * 8 + [3] * 4)
    assert rows(step(target)) == [(0, 0, 8, False)]
    assert rows(step(target)) == [(0, 8, 8, False)], "the prefill of the producer uses all tokens of the step"
    assert target._running_set.queue._parked == {}
    target.cancel("r0")
    assert rows(step(target)) == [(100, 8, 4, True)]


def test_priority_then_arrival() -> None:
    target = scheduler(max_batch_size=1)
    feed = Feed(target)
    feed([1], max_tokens=1, priority=1, arrival=0.0)
    feed([2], max_tokens=1, priority=0, arrival=2.0)
    feed([3], max_tokens=1, priority=0, arrival=1.0)
    assert [step(target).sequences[0].seq_id for _ in range(3)] == [200, 100, 0]


def test_small_requests_do_not_starve_a_large_one() -> None:
    target = scheduler(num_blocks=8, prefix_reuse=False)
    feed = Feed(target)
    feed([1] * 3, max_tokens=4, arrival=0.0)
    step(target)
    (large,) = feed([2] * 20, max_tokens=12, arrival=0.5)
    for i in range(40):
        feed([3] * 3, max_tokens=4, arrival=1.0 + i)
        step(target)
    assert large.status is Status.FINISHED


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_more_sequences_than_rows_alternate(policy: str) -> None:
    target = scheduler(max_batch_size=2, max_num_sequences=5, policy=policy)
    feed = Feed(target)
    seqs = [seq for i in range(5) for seq in feed([i] * 3, max_tokens=30)]
    for _ in range(40):
        assert len(step(target)) == 2
    lengths = [len(seq.tokens) for seq in seqs]
    assert target.num_running == 5 and max(lengths) - min(lengths) <= 2


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize(("rows", "sequences", "stages"), [(2, 6, 1), (3, 11, 1), (4, 12, 1), (4, 12, 3)])
def test_a_stream_of_short_prompts_does_not_starve_one_as_long_as_a_step(
    chunked: bool, policy: str, rows: int, sequences: int, stages: int
) -> None:
    target = scheduler(
        max_batch_size=rows, max_num_tokens=16, max_num_sequences=sequences, chunked_prefill=chunked, policy=policy, num_blocks=1000,
        prefix_reuse=False, num_stages=stages,
    )  # fmt: skip
    feed, draw = Feed(target), random.Random(rows)
    for tick in range(200):
        while target.num_waiting < 6:
            feed([1] * draw.randrange(1, 4), max_tokens=draw.randrange(1, 30), arrival=float(feed.count))
        if tick == 3:
            (long,) = feed([1] * 16, max_tokens=2, arrival=float(feed.count))
        step(target, now=float(tick))
    assert long.status is Status.FINISHED, f"{long.num_computed} of its tokens are computed"


def test_guaranteed_no_evict_admits_sequences_that_can_reach_max_tokens() -> None:
    target = scheduler(num_blocks=8, prefix_reuse=False)
    feed = Feed(target)
    for i in range(3):
        feed([i] * 4, max_tokens=9)  # 12 token positions, 3 blocks
    step(target)
    assert target.num_running == 2 and target.num_waiting == 1


def test_max_utilization_admits_more_and_preempts_the_last() -> None:
    target = scheduler(num_blocks=8, policy="max_utilization", prefix_reuse=False)
    feed = Feed(target)
    seqs = [
        *feed([0] * 4, max_tokens=20, priority=5),
        *feed([1] * 4, max_tokens=20, arrival=1.0),
        *feed([2] * 4, max_tokens=20, arrival=2.0),
    ]
    step(target)
    assert target.num_running == 3
    while not target.num_preemptions:
        step(target)
    assert [seq.num_preemptions for seq in seqs] == [1, 0, 0], "the lowest priority is preempted, although it arrived first"
    while target.has_work:
        step(target)
    assert {len(seq.tokens) for seq in seqs} == {24}


def test_a_preempted_sequence_recomputes_its_generated_tokens() -> None:
    target = scheduler(num_blocks=6, policy="max_utilization", prefix_reuse=False)
    feed = Feed(target)
    one, two = *feed([1] * 7, max_tokens=12), *feed([2] * 5, max_tokens=12, arrival=1.0)
    plans = []
    while target.has_work:
        plans.append(rows(step(target)))
    again = [row for plan in plans for row in plan if row[0] == two.seq_id and row[1] == 0]
    assert len(again) == 2 and again[1][2] > 5 and again[1][3]
    assert len(one.tokens) == 19 and len(two.tokens) == 17


def test_static_runs_a_batch_to_its_end() -> None:
    target = scheduler(policy="static", max_num_tokens=8)
    feed = Feed(target)
    first = [seq for i in range(3) for seq in feed([i] * 6, max_tokens=2 + i)]
    step(target)
    assert target.num_running == 3, "a batch is admitted beyond max_num_tokens"
    (late,) = feed([9] * 3)
    while any(seq.status is Status.RUNNING for seq in first):
        assert late.status is Status.WAITING
        step(target)
    step(target)
    assert late.status is Status.RUNNING


def test_requests_that_can_never_run_are_rejected() -> None:
    target = scheduler(num_blocks=4, chunked_prefill=False, max_num_tokens=8)
    for prompt, max_tokens, field in (
        ([], 1, "prompt_ids"),
        ([1] * 64, 1, "prompt_ids"),
        ([1] * 9, 1, "prompt_ids"),
        ([1] * 8, 10, "max_tokens"),
    ):
        request = TokenRequest(request_id="r", prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens))
        with pytest.raises(RequestError) as caught:
            target.check(request)
        assert caught.value.field == field
    target.check(TokenRequest(request_id="r", prompt_ids=[1] * 8, params=SamplingParams(max_tokens=9)))


def test_the_retry_time_is_the_mean_time_between_admissions() -> None:
    target = scheduler(max_batch_size=1)
    feed = Feed(target)
    for i in range(8):
        feed([i], max_tokens=1)
    assert target.retry_after_s(0.0) == 1.0
    for i in range(5):
        step(target, now=4.0 * i)
    assert target.retry_after_s(20.0) == pytest.approx(4.0)
    assert target.retry_after_s(9999.0) == 60.0


def test_entries_of_cancelled_waiting_requests_are_removed() -> None:
    target = scheduler(max_batch_size=1)
    feed = Feed(target)
    feed([1] * 3, max_tokens=50)
    step(target)
    for i in range(1000):
        feed([2] * 3)
        target.cancel(f"r{i + 1}")
    assert target.num_waiting == 0 and len(target._running_set.queue._new) < 100


def test_plans_are_committed_in_order_with_ids_of_all_rows() -> None:
    target = scheduler()
    Feed(target)([1] * 3)
    first, second = target.plan(0.0), target.plan(0.0)
    with pytest.raises(ValueError, match="order"):
        target.commit(second, [[1]])
    with pytest.raises(ValueError, match="token ids of 0 rows for a step of 1 rows"):
        target.commit(first, [])
    target.commit(first, [[1]])
    with pytest.raises(ValueError, match="order"):
        target.commit(first, [[1]])


def test_policies_are_those_of_the_configuration() -> None:
    for name in POLICIES.names():
        RuntimeConfig(policy=name)
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(policy="none")
    assert all(name in str(caught.value) for name in POLICIES.names())
    with pytest.raises(ConfigError, match="max_utilization"):
        scheduler(policy="max_utilisation")


def test_the_admission_record_counts_the_time_in_the_queue_and_the_blocks_of_the_prompt() -> None:
    """Six blocks of 4 tokens. The second prompt shares two of them; the third evicts cached blocks after the empty ones are used."""
    target = scheduler(num_blocks=6)
    feed = Feed(target)
    found = []
    for prompt, arrival in (([1] * 10, 1.0), ([1] * 8 + [2] * 3, 2.0), ([3] * 21, 3.0)):
        (seq,) = feed(prompt, max_tokens=1, arrival=arrival)
        assert seq.admission is None
        step(target, now=arrival + 0.5)
        assert seq.finish_reason is not None
        found.append(seq.admission)
    assert found == [AdmissionRecord(0.5, 0, 3, 3), AdmissionRecord(0.5, 2, 1, 1), AdmissionRecord(0.5, 0, 6, 4)]
