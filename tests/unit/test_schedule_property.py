"""Random workloads on a stub device that checks, slot by slot, that every row reads exactly its own tokens.

Rows yield 0 to 8 tokens: drafts come from the host, or from the device while earlier steps are still in flight.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.base.errors import RequestError
from stoker.base.types import FinishReason, Guide, SamplingParams
from stoker.runtime.request import Sequence, Status, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.proposers import PROPOSERS
from stoker.runtime.schedule.scheduler import Scheduler
from unit.stub_device import EXPECTED, VOCAB, Device, DeviceDrafts, Flight, HostDrafts, reference

STUBS = {"host_drafts": HostDrafts, "device_drafts": DeviceDrafts}


@pytest.fixture(autouse=True, scope="module")
def stub_proposers() -> Iterator[None]:
    """Two more rows in the table of proposers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in STUBS.items():
            patch.setitem(PROPOSERS._rows, name, stub)
        yield


def check_plan(scheduler: Scheduler, config: dict, plan: StepPlan) -> None:
    assert len(plan) <= config["max_batch_size"] and plan.num_tokens == sum(plan.num_new) <= config["max_num_tokens"]
    assert len({seq.seq_id for seq in plan.sequences}) == len(plan)
    assert all(num_new > 0 for num_new in plan.num_new)
    for i, seq in enumerate(plan.sequences):
        start, num_new, drafts = plan.starts[i], plan.num_new[i], plan.drafts[i]
        if i < plan.num_decodes:
            assert num_new == 1 and start >= seq.num_prompt and plan.samples[i]
        if drafts:
            assert num_new == 1 + len(drafts) and start >= seq.num_prompt and plan.samples[i]
        assert start + num_new <= seq.max_computed, "scheduled past max_tokens"
        assert len(seq.tokens) + seq.num_pending <= seq.num_prompt + seq.max_tokens
        if not config["chunked_prefill"] and start < seq.num_prompt:
            assert start + num_new >= seq.num_prompt, "a prompt was cut"
        if seq.waits_for_ids:
            assert seq.num_pending <= 1 + len(drafts) and start + num_new - len(drafts) <= len(seq.tokens)
    last = max((i for i, drafts in enumerate(plan.drafts) if drafts), default=-1)
    assert all(i < plan.num_decodes or plan.drafts[i] for i in range(last)), "rows with drafts stand between decodes and prefills"
    prefills = [num_new for i, num_new in enumerate(plan.num_new) if i > last and i >= plan.num_decodes]
    assert plan.num_prefill_tokens == sum(prefills)


def check_blocks(scheduler: Scheduler, sequences: list[Sequence], flights) -> None:
    tables, pool = scheduler.kv_cache, scheduler.kv_cache.pool
    holders = [seq for seq in sequences if seq.row >= 0]
    refs = Counter(block for seq in holders for block in seq.blocks)
    assert pool.refs == [refs[block] for block in range(pool.num_blocks)]
    assert pool.num_free == pool.refs.count(0) and pool.num_cached <= pool.num_free
    assert all(len(set(seq.blocks)) == len(seq.blocks) for seq in holders)
    assert all(not seq.blocks for seq in sequences if seq.row < 0)
    assert len({seq.row for seq in holders}) == len(holders) == scheduler.num_running
    growth = [tables.num_blocks_for(seq.max_computed) - len(seq.blocks) for seq in holders if seq.status is Status.RUNNING]
    assert tables.num_reserved == sum(growth)
    idle = [seq for seq in holders if seq.status is Status.RUNNING and not seq.num_in_flight]
    assert all(len(seq.blocks) <= tables.num_blocks_for(len(seq.tokens)) for seq in idle), "a rejected draft holds a block"
    assert scheduler.num_waiting + scheduler.num_preempted == sum(seq.status is Status.WAITING for seq in sequences)
    for flight in flights:
        for planned in flight.rows:
            seq, blocks = planned.seq, planned.blocks
            assert seq.row == planned.row and seq.blocks[: len(blocks)] == blocks, "taken away under a planned step"
    if tables.index is None:
        assert pool.num_cached == 0
    else:
        assert [bool(kept) for kept in pool._kept] == [entry is not None for entry in tables.index._by_block]
        assert all(entry.block == block for block, entry in enumerate(tables.index._by_block) if entry is not None)


def drive(config: dict, workload: dict) -> list:
    """Run a workload to its end, checking everything on the way. Returns a trace, to compare runs."""
    scheduler = Scheduler(**config)
    device = Device(config["tokens_per_block"], workload["p_nothing"])
    sequences: list[Sequence] = []
    requests: list[tuple[int, TokenRequest]] = list(workload["requests"])
    flights: deque[Flight] = deque()
    trace: list = []
    EXPECTED.clear()
    tick, paused = 0, False

    def commit() -> None:
        flight = flights.popleft()
        if flight.ids is None:
            device.run(flight)
        if tick in workload["failures"]:
            victims = scheduler.fail(flight.plan)
            assert all(seq.finish_reason is FinishReason.ERROR for seq in victims)
            return
        alive = {seq.seq_id for seq in flight.plan.sequences if seq.status is not Status.FINISHED}
        outcome = scheduler.commit(flight.plan, flight.ids)
        device.applied(flight)
        assert {seq.seq_id for seq in outcome.sequences} <= alive and all(outcome.token_ids)
        assert all(seq.tokens[-len(ids) :] == ids for seq, ids in zip(outcome.sequences, outcome.token_ids, strict=True))
        assert all(seq.status is Status.FINISHED and seq.finish_reason for seq in outcome.finished)
        assert {seq.seq_id for seq in outcome.finished} <= {seq.seq_id for seq in outcome.sequences}
        trace.append([(seq.seq_id, ids) for seq, ids in zip(outcome.sequences, outcome.token_ids, strict=True)])

    while requests or scheduler.has_work or scheduler.num_waiting:
        tick += 1
        assert tick < 3000, "a sequence starves"
        now = float(tick)
        for seq in scheduler.expire(now):
            assert seq.deadline is not None and seq.deadline <= now and seq.finish_reason is FinishReason.DEADLINE
        while requests and requests[0][0] <= tick:
            _, request = requests.pop(0)
            try:
                scheduler.check(request)
            except RequestError:
                continue
            for index in range(request.params.n):
                seq = Sequence(len(sequences), request, index, now)
                sequences.append(seq)
                scheduler.add(seq)
                EXPECTED[seq.seq_id] = reference(seq)[0]
        for request_id in workload["cancels"].get(tick, ()):
            for seq in scheduler.cancel(request_id):
                assert seq.finish_reason is FinishReason.CANCELLED
            assert request_id not in scheduler
        if (tick in workload["pauses"]) != paused:
            paused = not paused
            scheduler.pause(paused)
        holding = scheduler.num_running
        plan = scheduler.plan(now)
        if config["policy"] == "static" and holding:
            assert scheduler.num_running <= holding, "joined a running batch"
        check_plan(scheduler, config, plan)
        trace.append([(seq.seq_id, start, num_new) for seq, start, num_new in zip(plan.sequences, plan.starts, plan.num_new, strict=True)])
        if plan.sequences:
            flights.append(device.copy(plan))
            if workload["eager"]:
                device.run(flights[-1])
        elif not flights:
            assert not scheduler.has_work, "work to do, and nothing planned"
        check_blocks(scheduler, sequences, flights)
        while len(flights) > workload["depth"] or (flights and not plan.sequences):
            commit()
            check_blocks(scheduler, sequences, flights)
            if not plan.sequences:
                break
    finish(scheduler, config, sequences)
    return trace


def finish(scheduler: Scheduler, config: dict, sequences: list[Sequence]) -> None:
    assert scheduler.kv_cache.pool.num_free == config["num_blocks"] and scheduler.num_running == scheduler.kv_cache.num_reserved == 0
    assert not scheduler._requests and not scheduler.kv_cache._fronts and not scheduler._running_set.queue._parked
    assert config["policy"] == "max_utilization" or scheduler.num_preemptions == 0
    for seq in sequences:
        tokens, reason = reference(seq)
        generated = seq.tokens[seq.num_prompt :]
        assert seq.status is Status.FINISHED and seq.num_in_flight == seq.num_pending == 0
        if seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (generated, seq.finish_reason) == (tokens, reason)
            assert seq.stop_id == (tokens[-1] if reason is FinishReason.STOP else None)
        else:
            assert generated == tokens[: len(generated)]


@st.composite
def configs(draw) -> dict:
    max_batch_size = draw(st.integers(1, 5))
    return {
        "policy": draw(st.sampled_from(POLICIES.names())),
        "num_blocks": draw(st.integers(3, 24)),
        "tokens_per_block": draw(st.integers(1, 4)),
        "max_batch_size": max_batch_size,
        "max_num_tokens": draw(st.integers(1, 20)),
        "max_num_sequences": draw(st.none() | st.integers(1, max_batch_size + 4)),
        "max_seq_len": draw(st.integers(8, 40)),
        "chunked_prefill": draw(st.booleans()),
        "prefix_reuse": draw(st.booleans()),
        "proposer": draw(st.sampled_from(("none", *STUBS))),
    }


@st.composite
def workloads(draw, max_requests: int = 12) -> dict:
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    bases = [[rng.randrange(VOCAB) for _ in range(16)] for _ in range(2)]
    requests, cancels, tick = [], {}, 1
    for i in range(draw(st.integers(1, max_requests))):
        tick += rng.choice((0, 0, 0, 1, 5))
        base = rng.choice(bases)
        prompt = base[: rng.randrange(17)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 5))] or [1]
        max_tokens = rng.randrange(1, 14)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, max_tokens // 2)),
            n=rng.choice((1, 1, 1, 2, 3)),
            guide=Guide("json") if rng.random() < 0.1 else None,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        end_ids = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 2))))
        timeout = float(rng.randrange(1, 40)) if rng.random() < 0.1 else None
        request = TokenRequest(
            request_id=f"r{i}", prompt_ids=prompt, params=params, end_ids=end_ids, priority=rng.choice((0, 0, 1)), timeout_s=timeout,
            cache_salt=rng.choice(("", "", "a")),
        )  # fmt: skip
        requests.append((tick, request))
        if rng.random() < 0.2:
            cancels.setdefault(tick + rng.randrange(0, 12), []).append(request.request_id)
    pauses = set(range(5, 5 + rng.randrange(20))) if draw(st.integers(0, 4)) == 0 else set()
    failures = {rng.randrange(3, 30)} if draw(st.integers(0, 4)) == 0 else set()
    return {
        "requests": requests, "cancels": cancels, "pauses": pauses, "failures": failures, "depth": draw(st.integers(0, 2)),
        "eager": draw(st.booleans()), "p_nothing": draw(st.sampled_from((0.0, 0.0, 0.2))),
    }  # fmt: skip


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads())
def test_any_workload_ends_right(config: dict, workload: dict) -> None:
    drive(config, workload)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads(max_requests=20), st.integers(0, 3))
def test_tight_memory_preempts_and_ends_right(config: dict, workload: dict, slack: int) -> None:
    config = config | {"policy": "max_utilization", "max_batch_size": 5, "max_num_sequences": None, "max_seq_len": 33}
    config["num_blocks"] = -(-32 // config["tokens_per_block"]) + slack
    drive(config, workload)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads())
def test_the_same_workload_gives_the_same_steps(config: dict, workload: dict) -> None:
    assert drive(config, workload) == drive(config, workload)


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("proposer", ["none", *STUBS])
def test_a_long_run_ends_right(policy: str, depth: int, proposer: str) -> None:
    rng = random.Random(depth)
    base = [rng.randrange(VOCAB) for _ in range(40)]
    requests = []
    for i in range(120):
        prompt = base[: rng.randrange(40)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), n=rng.choice((1, 1, 2)))
        requests.append((i // 4, TokenRequest(request_id=str(i), prompt_ids=prompt, params=params, end_ids=(3,) if i % 3 else ())))
    config = {
        "policy": policy, "num_blocks": 60, "tokens_per_block": 4, "max_batch_size": 12, "max_num_tokens": 48, "max_num_sequences": 16,
        "max_seq_len": 128, "chunked_prefill": True, "prefix_reuse": True, "proposer": proposer,
    }  # fmt: skip
    drive(
        config, {"requests": requests, "cancels": {}, "pauses": set(), "failures": set(), "depth": depth, "eager": False, "p_nothing": 0.0}
    )
