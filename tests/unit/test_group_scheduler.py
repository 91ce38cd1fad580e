"""Steps that a GroupScheduler plans together are those that a Scheduler plans one by one; so are the results of simulations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import ConfigError, RequestError
from stoker.base.types import SamplingParams
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.decode_group import UNKNOWN_TOKEN
from stoker.runtime.schedule.group_scheduler import GroupPlan, GroupScheduler
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.simulation.fleet import FleetSettings, TraceSettings, simulate_fleet
from stoker.simulation.latencies import Latencies
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.running_steps import RunningSteps
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import Arrival

STEP_S = 0.01
REQUEST = st.tuples(
    st.integers(0, 30),  # steps after the request before it
    st.lists(st.integers(0, 1), min_size=1, max_size=30),  # a prompt that others share in part
    st.integers(1, 40),  # new tokens
)
Record = list[Any]


def sequences(requests: list[tuple[int, list[int], int]], check: Callable[[TokenRequest], None]) -> list[tuple[int, Sequence]]:
    """(step at which it arrives, sequence) of the requests that the scheduler accepts."""
    found, at = [], 0
    for i, (gap, prompt, max_tokens) in enumerate(requests):
        request = TokenRequest(request_id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens, seed=0))
        at += gap
        try:
            check(request)
        except RequestError:
            continue
        found.append((at, Sequence(i, request, 0, at * STEP_S)))
    return found


def changes(log: BlockEventLog) -> Record:
    return [(stored, node.block, node.digest) for nodes, stored in log.pop() for node in nodes]


def state(scheduler: Scheduler) -> Record:
    kv_cache, pool = scheduler.kv_cache, scheduler.kv_cache.pool
    running = [(seq.seq_id, seq.row) for seq in scheduler.running()]
    if kv_cache.index is None:  # a group does not allocate the blocks that are reserved
        return [running, pool.num_free - kv_cache.num_reserved, scheduler.num_waiting]
    return [running, pool.refs, pool._empty, list(pool._cached), kv_cache.num_reserved, scheduler.num_waiting, kv_cache._announced.keys()]


def one_by_one(config: dict[str, Any], requests: list[tuple[int, list[int], int]]) -> Record:
    """The record of each step: its size, block events, first tokens and ended sequences, and the state of the scheduler after it."""
    log, record, step = BlockEventLog(), [], 0
    scheduler = Scheduler(**config, event_log=log)
    arrivals = sequences(requests, scheduler.check)
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= step:
            scheduler.add(arrivals.pop(0)[1])
        plan = scheduler.plan(step * STEP_S)
        step += 1
        if not plan.sequences:
            continue
        size = [step, plan.num_decodes, plan.num_prefill_tokens, sum(plan.starts)]
        scheduler.record_time(plan, STEP_S * (1 + 0.1 * plan.num_tokens))
        outcome = scheduler.commit(plan, [[UNKNOWN_TOKEN] if samples else [] for samples in plan.samples])
        first = [seq.seq_id for seq in outcome.sequences if len(seq.tokens) == seq.num_prompt + 1]
        ended = [(seq.seq_id, seq.tokens, seq.finish_reason, seq.num_cached) for seq in outcome.finished]
        record.append([*size, first, changes(log), ended, state(scheduler) if ended or plan.num_prefill_tokens else None])
    return record


def evictions(record: Record) -> Record:
    """The blocks that have been evicted after each step, and all block events after each step in which a sequence ends."""
    events, rows = Record(), Record()
    for *row, changed, ended, after in record:
        events += changed
        rows.append([*row, [event for event in changed if not event[0]], events if ended else None, ended, after])
        events = [] if ended else events
    return rows


def together(config: dict[str, Any], requests: list[tuple[int, list[int], int]], limits: list[int], stops_at_blocks: bool) -> Record:
    """The same record from steps that are planned together, and stopped after at most `limits` steps."""
    log, record, step = BlockEventLog(), [], 0
    scheduler = GroupScheduler(**config, event_log=log, stops_at_blocks=stops_at_blocks)
    arrivals = sequences(requests, scheduler.check)
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= step:
            scheduler.add(arrivals.pop(0)[1])
        plan = scheduler.plan_steps(step * STEP_S)
        if not len(plan):
            step += 1
            continue
        count = min(plan.num_equal_steps, arrivals[0][0] - step if arrivals else 1000, limits[step % len(limits)])
        if scheduler.budget.has_target:
            assert count == 1
        scheduler.record_time(plan, STEP_S * (1 + 0.1 * plan.num_tokens))
        for i in range(count):
            step += 1
            context = plan.num_context_tokens + i * plan.num_decodes
            record.append([step, plan.num_decodes, plan.num_prefill_tokens, context, [], [], [], None])
            if not stops_at_blocks and scheduler.num_steps_to_events(count) == i + 1:
                scheduler.pass_steps(i + 1)
                record[-1][5] = changes(log)
        outcome = scheduler.commit_steps(plan, count)
        ended = [(seq.seq_id, seq.tokens, seq.finish_reason, seq.num_cached) for seq in outcome.finished]
        has_state = ended or plan.num_prefill_tokens
        record[-1][4:] = [[seq.seq_id for seq in outcome.sequences], changes(log), ended, state(scheduler) if has_state else None]
    return record


@settings(max_examples=120, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=14),
    st.lists(st.sampled_from([1, 2, 5, 1000]), min_size=1, max_size=5),
    st.integers(4, 40),
    st.integers(1, 6),
    st.sampled_from([6, 16, 100]),
    st.booleans(),
    st.sampled_from([None, 0.02]),
    st.booleans(),
)
def test_steps_that_are_planned_together_equal_single_ones(
    requests: list[tuple[int, list[int], int]],
    limits: list[int],
    num_blocks: int,
    rows: int,
    tokens: int,
    reuse: bool,
    target: float | None,
    stops_at_blocks: bool,
) -> None:
    """Without `stops_at_blocks`, the blocks that answers fill are indexed later, but in the same order, and with the same evictions."""
    config = {
        "num_blocks": num_blocks, "tokens_per_block": 4, "max_batch_size": rows, "max_num_tokens": tokens, "max_seq_len": 64,
        "prefix_reuse": reuse, "target_itl_s": target, "target_ttft_s": None,
    }  # fmt: skip
    expected, found = one_by_one(config, requests), together(config, requests, limits, stops_at_blocks)
    assert found == expected if stops_at_blocks else evictions(found) == evictions(expected)


TIMES = StepTimes(fixed_s=0.002, row_s=0.0003, prefill_token_s=0.0001, context_token_s=0.000002)
SMALL = ReplicaSettings(max_batch_size=12, max_num_tokens=256, kv_cache_tokens=8192, tokens_per_block=16)


def trace(count: int, num_prefixes: int | None = None) -> list[Arrival]:
    """Prompts whose first tokens differ; with `num_prefixes`, only as many do."""
    first = range(count) if num_prefixes is None else [i * i % num_prefixes for i in range(count)]
    return [Arrival(i * 0.004 + i % 7 * 0.0005, [first[i]] + [0] * (i * 37 % 250), 1 + i * 29 % 90) for i in range(count)]


def summary(results: Results) -> list[float]:
    steps = results.between_tokens_s
    numbers = [results.num_steps, results.num_output_tokens, results.num_prompt_tokens, results.num_rejected, steps.count]
    series = [value for name in ("first_token_s", "token_s", "duration_s", "transfer_s") for value in sorted(getattr(results, name))]
    return [*numbers, results.end_s, steps.total_s, steps.min_s, steps.max_s, *series]


@pytest.mark.parametrize(("num_prefill", "num_prefixes"), [(0, None), (0, 40), (1, None), (1, 40)])
def test_a_simulation_does_not_depend_on_the_number_of_steps_that_are_planned_together(
    num_prefill: int, num_prefixes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 40 prefixes, blocks are reused, and evicted while steps run; the router chooses by what the replicas hold then."""
    arrivals = trace(400, num_prefixes)
    routing = RoutingSettings(disaggregate_tokens=64 if num_prefill else 0)
    bulk = Simulator(3, SMALL, TIMES, routing, num_prefill).run(arrivals)
    plan_steps = GroupScheduler.plan_steps

    def plan_one(self: GroupScheduler, now: float) -> GroupPlan:
        plan = plan_steps(self, now)
        plan.num_equal_steps = 1
        return plan

    monkeypatch.setattr(GroupScheduler, "plan_steps", plan_one)
    single = Simulator(3, SMALL, TIMES, routing, num_prefill).run(arrivals)
    assert summary(bulk) == pytest.approx(summary(single), rel=1e-9) and bulk.num_steps > 1000
    assert bulk.num_reused_tokens == single.num_reused_tokens and (num_prefixes is None or bulk.num_reused_tokens > 1000)
    assert (num_prefill > 0) == (len(bulk.transfer_s) > 0)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_without_equal_prompts_it_does_not_matter_whether_answers_are_indexed(num_prefill: int) -> None:
    """Blocks of answers that are not indexed take room in the cache all the same, so that the same blocks of prompts are evicted."""
    arrivals = [msgspec.structs.replace(arrival, prompt_ids=[*arrival.prompt_ids, 100 + i]) for i, arrival in enumerate(trace(400, 40))]
    routing = RoutingSettings(disaggregate_tokens=64 if num_prefill else 0)
    small = msgspec.structs.replace(SMALL, kv_cache_tokens=2048)
    indexed, not_indexed = (Simulator(3, small, TIMES, routing, num_prefill, index_answers=index).run(arrivals) for index in (True, False))
    assert summary(not_indexed) == pytest.approx(summary(indexed), rel=1e-9)
    assert not_indexed.num_reused_tokens == indexed.num_reused_tokens > 1000
    roomy = Simulator(3, SMALL, TIMES, routing, num_prefill, index_answers=False).run(arrivals)
    assert roomy.num_reused_tokens > indexed.num_reused_tokens + 500  # blocks of prompts were evicted


def test_without_common_prompts_the_prefix_index_changes_nothing() -> None:
    indexed, not_indexed = (Simulator(3, SMALL, TIMES, prefix_reuse=reuse).run(trace(400)) for reuse in (True, False))
    assert summary(indexed) == pytest.approx(summary(not_indexed), rel=1e-9) and indexed.num_reused_tokens == 0


def test_the_results_of_a_fleet_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    """Each router forwards every third request to its replicas."""
    file = tmp_path / "trace.csv"
    rows = [f"{arrival.at_s},{len(arrival.prompt_ids)},{arrival.max_tokens}" for arrival in trace(300)]
    file.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *rows]))
    requests = TraceSettings(file=file, format="burstgpt", rate=0.5)
    fleet = FleetSettings(num_replicas=5, num_routers=3, replica=SMALL, step_times=TIMES)
    results = simulate_fleet(fleet, requests, 1)
    assert summary(simulate_fleet(fleet, requests, 2)) == pytest.approx(summary(results), rel=1e-9) and len(results.duration_s) == 300
    alone = Simulator(1, SMALL, TIMES, prefix_reuse=False).run(
        request.arrival(rate=0.5) for request in requests.requests([False, False, True]) if request is not None
    )
    assert set(alone.duration_s) < set(results.duration_s)  # of five replicas, the third router has one
    with pytest.raises(ConfigError, match="routers=6 exceeds replicas=5"):
        msgspec.structs.replace(fleet, num_routers=6)
    with pytest.raises(ConfigError, match="max_num_tokens=256 is less than max_batch_size=257"):
        msgspec.structs.replace(SMALL, max_batch_size=257)


@given(st.floats(1e-4, 1.0), st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)), st.integers(1, 200), st.floats(-0.1, 1.1))
def test_running_steps_stop_at_the_end_of_the_current_one(first_s: float, growth_s: float, count: int, where: float) -> None:
    plan = GroupPlan()
    plan.num_equal_steps = count
    steps = RunningSteps(plan, 5.0, first_s, growth_s)
    ends = [steps.end_s(i) for i in range(1, count + 1)]
    now = 5.0 + where * (ends[-1] - 5.0)
    stopped = steps.stop(now)
    assert steps.count == next((i for i, end in enumerate(ends, 1) if end >= now), count) and stopped == (steps.count < count)


def test_latencies_have_percentiles_by_the_nearest_rank() -> None:
    latencies, other = Latencies(), Latencies()
    latencies.add_series(0.010, 0.001, 5, 3)
    other.add(0.1, 5)
    latencies.merge(other)
    values = sorted([0.010 + i * 0.001 for i in range(5)] * 3 + [0.1] * 5)
    for percent in (1, 10, 50, 75, 76, 99, 100):
        assert latencies.percentile(percent) == pytest.approx(values[-(-len(values) * percent // 100) - 1], rel=5e-4)
    assert (latencies.count, latencies.min_s, latencies.max_s) == (20, 0.010, 0.1) and latencies.total_s == pytest.approx(sum(values))
    with pytest.raises(ValueError, match="no times"):
        Latencies().percentile(50)
