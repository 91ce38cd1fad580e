"""Random workloads on a stub device that checks, slot by slot, that every row reads exactly its own tokens.

Rows yield 0 to 8 tokens: drafts come from the host, or from the device while earlier steps are still in flight. Rows have adapters, and
evicted blocks may be stored in a stub of a host tier and loaded again.
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
from stoker.runtime.kv.prefix_index import PrefixNode
from stoker.runtime.kv.snapshots import StateSnapshots
from stoker.runtime.kv.tiers import Tier
from stoker.runtime.request import PrefixRoot, Sequence, Status, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.policies import POLICIES
from stoker.runtime.schedule.proposers import PROPOSERS
from stoker.runtime.schedule.scheduler import Scheduler
from unit.stub_device import EXPECTED, MAX_DRAFTS, VOCAB, Device, DeviceDrafts, Flight, HostDrafts, StubHostTier, reference

STUBS = {"host_drafts": HostDrafts, "device_drafts": DeviceDrafts}


@pytest.fixture(autouse=True, scope="module")
def stub_proposers() -> Iterator[None]:
    """Add two rows to the table of proposers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in STUBS.items():
            patch.setitem(PROPOSERS._rows, name, stub)
        yield


def check_plan(scheduler: Scheduler, config: dict, plan: StepPlan) -> None:
    assert len(plan) <= config["max_batch_size"] and plan.num_tokens == sum(plan.num_new) <= config["max_num_tokens"]
    assert len({seq.seq_id for seq in plan.sequences}) == len(plan)
    assert all(num_new > 0 for num_new in plan.num_new)
    adapters = [seq.request.adapter for seq in plan.sequences]
    assert plan.adapters == (adapters if any(adapter >= 0 for adapter in adapters) else None)
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
    if scheduler.kv_cache.snapshots is not None:
        assert len(prefills) * max(prefills, default=0) <= config["max_num_tokens"], "padded prefills have more places than a step"


def check_blocks(scheduler: Scheduler, sequences: list[Sequence], flights) -> None:
    tables, pool = scheduler.kv_cache, scheduler.kv_cache.pool
    holders = [seq for seq in sequences if seq.row >= 0]
    transfers = [*scheduler.kv_cache.pending_transfers, *(transfer for flight in flights for transfer in flight.plan.transfers)]
    loads = [transfer.target_block for transfer in transfers if transfer.target is Tier.DEVICE]
    refs = Counter(block for seq in holders for block in seq.blocks)
    assert len(set(loads)) == len(loads) and all(refs[block] <= 1 for block in loads), "a block is shared while it is loaded"
    refs.update(loads)
    assert pool.refs == [refs[block] for block in range(pool.num_blocks)]
    assert pool.num_free == pool.refs.count(0) and pool.num_cached <= pool.num_free
    assert all(len(set(seq.blocks)) == len(seq.blocks) for seq in holders)
    assert all(not seq.blocks for seq in sequences if seq.row < 0)
    assert len({seq.row for seq in holders}) == len(holders) == scheduler.num_running
    roots = {block: seq.prefix_root for seq in holders for block in seq.blocks}
    assert all(roots[block] == seq.prefix_root for seq in holders for block in seq.blocks), "adapters or salts share a block"
    growth = [tables.num_blocks_for(seq.max_computed) - len(seq.blocks) for seq in holders if seq.status is Status.RUNNING]
    assert tables.num_reserved == sum(growth)
    idle = [seq for seq in holders if seq.status is Status.RUNNING and not seq.num_in_flight]
    # Without drafts, blocks of up to two steps that were planned ahead and dropped remain, because the next tokens need them.
    spare = 0 if scheduler._proposer.max_drafts else 2
    assert all(len(seq.blocks) <= tables.num_blocks_for(len(seq.tokens)) + spare for seq in idle), "a rejected draft holds a block"
    assert scheduler.num_waiting + scheduler.num_preempted == sum(seq.status is Status.WAITING for seq in sequences)
    for flight in flights:
        for planned in flight.rows:
            seq, blocks = planned.seq, planned.blocks
            assert seq.row == planned.row and seq.blocks[: len(blocks)] == blocks, "the row or a block of a planned step was released"
    if tables.index is None:
        assert pool.num_cached == 0
    else:
        assert [bool(flag) for flag in pool._is_reusable] == [entry is not None for entry in tables.index._by_block]
        assert all(entry.block == block for block, entry in enumerate(tables.index._by_block) if entry is not None)
        assert all(root_of(entry) == roots.get(block, root_of(entry)) for block, entry in enumerate(tables.index._by_block) if entry)
        assert all(tables.index.node_of(block) is None for block in loads), "a block is indexed while it is loaded"


def root_of(node: PrefixNode) -> PrefixRoot:
    while isinstance(node.parent, PrefixNode):
        node = node.parent
    return node.parent


def drive(config: dict, workload: dict) -> list:
    """Run a workload to its end, and check all invariants after each action. Returns a trace, to compare runs.

    `num_snapshots` in the workload: the model has recurrent states, and that number of snapshots of them.
    """
    host_tier = StubHostTier(workload["host_blocks"], workload["p_decline"]) if workload["host_blocks"] else None
    num_snapshots = workload.get("num_snapshots")
    snapshots = None if num_snapshots is None else StateSnapshots(1000, num_snapshots)
    scheduler = Scheduler(**config, num_adapters=2, host_tier=host_tier, snapshots=snapshots)
    device = Device(config["tokens_per_block"], workload["p_nothing"], snapshots is not None)
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
            device.fail(flight)
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
    assert host_tier is None or host_tier.is_idle
    assert snapshots is None or len(snapshots) + snapshots.num_free == num_snapshots, "a slot is lost"
    return trace


def finish(scheduler: Scheduler, config: dict, sequences: list[Sequence]) -> None:
    assert scheduler.kv_cache.pool.num_free == config["num_blocks"] and scheduler.num_running == scheduler.kv_cache.num_reserved == 0
    assert not scheduler._requests and not scheduler.kv_cache._announced and not scheduler._running_set.queue._parked
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
            cache_salt=rng.choice(("", "", "a")), adapter=rng.choice((-1, -1, 0, 1)),
        )  # fmt: skip
        requests.append((tick, request))
        if rng.random() < 0.2:
            cancels.setdefault(tick + rng.randrange(0, 12), []).append(request.request_id)
    pauses = set(range(5, 5 + rng.randrange(20))) if draw(st.integers(0, 4)) == 0 else set()
    failures = {rng.randrange(3, 30)} if draw(st.integers(0, 4)) == 0 else set()
    return {
        "requests": requests, "cancels": cancels, "pauses": pauses, "failures": failures, "depth": draw(st.integers(0, 2)),
        "eager": draw(st.booleans()), "p_nothing": draw(st.sampled_from((0.0, 0.0, 0.2))),
        "host_blocks": draw(st.sampled_from((0, 0, 2, 8, 30))), "p_decline": draw(st.sampled_from((0.0, 0.3))),
    }  # fmt: skip


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads())
def test_random_workloads_generate_the_expected_tokens(config: dict, workload: dict) -> None:
    drive(config, workload)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), workloads(max_requests=20), st.integers(0, 3))
def test_random_workloads_with_preemption_generate_the_expected_tokens(config: dict, workload: dict, slack: int) -> None:
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
@pytest.mark.parametrize("host_blocks", [0, 40])
def test_a_long_workload_generates_the_expected_tokens(policy: str, depth: int, proposer: str, host_blocks: int) -> None:
    rng = random.Random(depth)
    base = [rng.randrange(VOCAB) for _ in range(40)]
    requests = []
    for i in range(120):
        prompt = base[: rng.randrange(40)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), n=rng.choice((1, 1, 2)))
        end_ids, adapter = (3,) if i % 3 else (), rng.choice((-1, 0, 1))
        requests.append((i // 4, TokenRequest(request_id=str(i), prompt_ids=prompt, params=params, end_ids=end_ids, adapter=adapter)))
    config = {
        "policy": policy, "num_blocks": 60, "tokens_per_block": 4, "max_batch_size": 12, "max_num_tokens": 48, "max_num_sequences": 16,
        "max_seq_len": 128, "chunked_prefill": True, "prefix_reuse": True, "proposer": proposer,
    }  # fmt: skip
    workload = {
        "requests": requests, "cancels": {}, "pauses": set(), "failures": set(), "depth": depth, "eager": False, "p_nothing": 0.0,
        "host_blocks": host_blocks, "p_decline": 0.0,
    }  # fmt: skip
    lengths = {len(row[1]) for step in drive(config, workload) for row in step if len(row) == 2}
    assert lengths == ({1} if proposer == "none" else set(range(1, MAX_DRAFTS + 2)))


def test_blocks_are_loaded_from_the_host_tier() -> None:
    """A prefix that was evicted from the device is loaded, not computed."""
    tier = StubHostTier(8, p_decline=0.0)
    scheduler = Scheduler(
        num_blocks=4, tokens_per_block=2, max_batch_size=2, max_num_tokens=16, max_seq_len=8, num_adapters=1, host_tier=tier
    )

    def run(name: str, prompt: list[int], adapter: int = -1) -> tuple[Sequence, StepPlan]:
        request = TokenRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=1), adapter=adapter)
        scheduler.add(seq := Sequence(0, request, 0, 0.0))
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, [[5]])
        return seq, plan

    _, plan = run("first", [1, 2, 3, 4, 5])
    assert not plan.transfers
    _, plan = run("second", [6, 6, 6, 6, 6, 6, 6])
    assert [transfer.source for transfer in plan.transfers] == [Tier.DEVICE] * 2
    seq, plan = run("adapter", [1, 2, 3, 4, 5], adapter=0)
    assert seq.num_cached == 0 and Tier.HOST not in {transfer.source for transfer in plan.transfers}
    seq, plan = run("again", [1, 2, 3, 4, 9])
    assert seq.num_cached == 4 and plan.num_tokens == 1
    assert [transfer.source for transfer in plan.transfers].count(Tier.HOST) == 2 and tier.is_idle
    assert scheduler.kv_cache.pool.num_free == 4


def host_tier_scheduler(**changes: int) -> tuple[Scheduler, StubHostTier]:
    """A scheduler whose host tier stores or is about to store the blocks of prompt [1, 2, 3, 4, 5]."""
    tier = StubHostTier(8, p_decline=0.0)
    config = {"num_blocks": 4, "tokens_per_block": 2, "max_batch_size": 1, "max_num_tokens": 16, "max_seq_len": 9} | changes
    scheduler = Scheduler(**config, host_tier=tier)
    add_prompt(scheduler, [1, 2, 3, 4, 5])
    scheduler.commit(scheduler.plan(0.0), [[5]])
    return scheduler, tier


def add_prompt(scheduler: Scheduler, prompt: list[int], max_tokens: int = 1) -> Sequence:
    seq = Sequence(
        len(prompt), TokenRequest(request_id=str(prompt), prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens)), 0, 0.0
    )
    scheduler.add(seq)
    return seq


def test_contents_whose_transfer_failed_are_not_found_in_the_host_tier() -> None:
    scheduler, tier = host_tier_scheduler()
    add_prompt(scheduler, [6] * 8)
    plan = scheduler.plan(0.0)
    assert [transfer.target for transfer in plan.transfers] == [Tier.HOST] * 2
    scheduler.fail(plan)
    assert tier.is_idle and not any(tier.digests)


def test_a_sequence_without_a_row_in_the_step_loads_nothing() -> None:
    """If the step fails, only the sequences in its rows end."""
    scheduler, tier = host_tier_scheduler(num_blocks=7, max_num_sequences=2)
    add_prompt(scheduler, [6] * 8)
    add_prompt(scheduler, [7] * 7)
    for _ in range(2):
        scheduler.commit(scheduler.plan(0.0), [[5]])
    assert any(tier.digests)
    add_prompt(scheduler, [8] * 2, max_tokens=6)
    scheduler.commit(scheduler.plan(0.0), [[5]])
    seq = add_prompt(scheduler, [1, 2, 3, 4, 9])
    plan = scheduler.plan(0.0)
    assert seq.status is Status.RUNNING and seq not in plan.sequences and seq.num_computed == 0
    assert Tier.HOST not in {transfer.source for transfer in plan.transfers}


def test_blocks_of_rejected_drafts_are_released_after_a_later_step_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that rejects drafts is committed while the sequence is in another step, which has no drafts."""
    scheduler = Scheduler(num_blocks=8, tokens_per_block=2, max_batch_size=1, max_num_tokens=8, max_seq_len=14, proposer="device_drafts")
    seq = add_prompt(scheduler, [1], max_tokens=12)
    scheduler.commit(scheduler.plan(0.0), [[5]])
    monkeypatch.setattr(DeviceDrafts, "propose", lambda self, seq, limit: [-1] * limit)
    with_drafts = scheduler.plan(0.0)
    monkeypatch.setattr(DeviceDrafts, "propose", lambda self, seq, limit: [])
    without_drafts = scheduler.plan(0.0)
    assert len(with_drafts.drafts[0]) == 7 and not without_drafts.drafts[0]
    scheduler.commit(with_drafts, [[5]])
    scheduler.commit(without_drafts, [[5]])
    assert (len(seq.tokens), len(seq.blocks)) == (4, 2)
