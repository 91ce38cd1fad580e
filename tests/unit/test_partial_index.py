"""Simulations that index only the blocks which occur repeatedly in a trace have the results of those that index all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import ConfigError
from stoker.base.types import SamplingParams
from stoker.router.core.settings import POLICIES, RoutingSettings
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.kv.partial_index import PartialIndexManager
from stoker.runtime.kv.prefix_index import pack_blocks
from stoker.runtime.request import Sequence, TokenRequest
from stoker.simulation.fleet import FleetSettings, TraceSettings, simulate_fleet
from stoker.simulation.replica import ReplicaSettings
from stoker.simulation.simulator import Results, Simulator
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import MOONCAKE_BLOCK, NUM_COUNTS, VOCAB_SIZE, RepeatedBlocks, TracedRequest, read_trace

TIMES = StepTimes(fixed_s=0.002, row_s=0.0003, prefill_token_s=0.00001, context_token_s=0.000002)


def requests(dice: random.Random, count: int, num_prefixes: int) -> Iterator[TracedRequest]:
    """Prompts that begin with common blocks, and some that equal an earlier one; the ids of others are equal modulo a power of two."""
    now, prompts = 0.0, list[list[int]]()
    for i in range(count):
        now += dice.expovariate(40.0)
        kind = dice.random()
        if kind < 0.1 and prompts:
            ids = list(dice.choice(prompts))
        else:
            prefix = range(dice.randrange(3)) if kind < 0.7 else ()
            ids = [1000 * (i * i % num_prefixes) + block for block in prefix]
            ids += [10**6 + 10 * i + j for j in range(dice.randrange(1, 3))]
        if kind > 0.9:
            ids[0] += dice.choice([VOCAB_SIZE, NUM_COUNTS])
        prompts.append(ids)
        num_prompt = dice.randrange(1, len(ids) * MOONCAKE_BLOCK + 1)
        yield TracedRequest(now, ids, MOONCAKE_BLOCK, num_prompt, dice.choice([1, 2, 20, 200]))


def record(trace: list[TracedRequest], settings: ReplicaSettings, policy: str, repeated: RepeatedBlocks | None) -> list[Any]:
    """All results, the evicted blocks of each replica in order, and the final state of its block pool."""
    simulator = Simulator(3, settings, TIMES, RoutingSettings(policy=policy), index_answers=False)
    evicted: dict[str, list[int]] = {name: [] for name in simulator._replicas}
    for name, replica in simulator._replicas.items():
        pool = replica.scheduler.kv_cache.pool
        forget = pool.on_evict
        assert forget is not None

        def evict(blocks: list[int], name: str = name, forget: Any = forget) -> None:
            evicted[name] += blocks
            forget(blocks)

        pool.on_evict = evict
    results = simulator.run(request.arrival(settings.tokens_per_block, repeated) for request in trace)
    pools = [replica.scheduler.kv_cache.pool for replica in simulator._replicas.values()]
    states = [(pool.refs, pool._empty, list(pool._cached), pool._is_reusable) for pool in pools]
    return [numbers(results), evicted, states]


def numbers(results: Results) -> list[Any]:
    steps = results.between_tokens_s
    series = [list(results.first_token_s), list(results.duration_s), sorted(steps._counts.items())]
    return [results.num_steps, results.num_reused_tokens, results.num_prompt_tokens, results.num_output_tokens, results.num_rejected,
            results.end_s, steps.count, steps.total_s, steps.min_s, steps.max_s, *series]  # fmt: skip


def repeated_blocks(trace: list[TracedRequest]) -> RepeatedBlocks:
    repeated = RepeatedBlocks()
    for request in trace:
        repeated.add(request.block_ids)
    return repeated


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.integers(1, 120),
    st.integers(1, 12),
    st.sampled_from([2048, 4096, 16384, 100_000]),
    st.sampled_from([16, 64, 128]),
    st.sampled_from(POLICIES),
    st.sampled_from([None, 20.0]),
)
def test_blocks_that_occur_once_need_not_be_indexed(
    seed: int, count: int, num_prefixes: int, cache: int, size: int, policy: str, target: float | None
) -> None:
    trace = list(requests(random.Random(seed), count, num_prefixes))
    replica = ReplicaSettings(
        max_batch_size=8, max_num_tokens=512, kv_cache_tokens=cache, tokens_per_block=size, target_itl_ms=target
    )  # fmt: skip
    assert record(trace, replica, policy, repeated_blocks(trace)) == record(trace, replica, policy, None)


def admitted(cache: PartialIndexManager, dice: random.Random, number: int) -> Sequence | None:
    """A sequence whose prompt is computed, with 0 to 3 common blocks and others; None if there is no room."""
    prefix = [dice.randrange(3)] * 4 * dice.randrange(4)
    ids = prefix + [100 + number] * dice.randrange(1, 24)
    request = TokenRequest(request_id=str(number), prompt_ids=ids, params=SamplingParams(max_tokens=dice.randrange(1, 30)))
    seq = Sequence(number, request, 0, 0.0)
    seq.max_computed = len(ids) + seq.max_tokens - 1
    seq.packed_blocks = pack_blocks(prefix, 4)
    match = cache.match(seq)
    if match.num_blocks_now + match.num_blocks_later + cache.num_reserved > match.num_free:
        return None
    cache.admit(seq, match)
    cache.register(seq, len(ids))
    return seq


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(12, 60))
def test_evictions_of_indexed_blocks_are_foreseen(seed: int, num_blocks: int) -> None:
    """`evicts_entries` agrees with the entries of the blocks that are evicted next, and every evicted block loses its entry."""
    dice, log = random.Random(seed), BlockEventLog()
    cache = PartialIndexManager(num_blocks, 4, prefix_reuse=True, event_log=log)
    assert cache.index is not None
    running, node_of = list[Sequence](), cache.index.node_of
    for number in range(120):
        choice = dice.random()
        if choice < 0.4 and (seq := admitted(cache, dice, number)) is not None:
            running.append(seq)
        elif choice < 0.7 and running:
            growing = [seq for seq in running if len(seq.blocks) < cache.num_blocks_for(seq.max_computed)]
            cache.grow_all(growing)
        elif running:
            seq = running.pop(dice.randrange(len(running)))
            cache.pool.mark_reusable(seq.blocks[seq.num_hashed :])
            cache.retire(seq)
            cache.release(seq)
        count = dice.randrange(cache.pool.num_free + 1)
        evicted = list(cache.pool._cached)[: max(count - cache.pool.num_empty, 0)]
        assert cache.evicts_entries(count) == any(node_of(block) is not None for block in evicted)
        assert all(cache.pool.refs[node.block] or cache.pool._is_reusable[node.block] for node in cache.index._entries.values())
    for seq in running:
        cache.release(seq)
    assert not any(cache.pool.refs)


def test_most_blocks_of_a_trace_are_not_indexed() -> None:
    """Evicted blocks that prompts would have reused, and blocks without an entry, are part of the compared results."""
    trace = list(requests(random.Random(1), 400, 20))
    replica = ReplicaSettings(max_batch_size=8, max_num_tokens=512, kv_cache_tokens=8192)
    found = record(trace, replica, "prefix", repeated_blocks(trace))
    assert found == record(trace, replica, "prefix", None)
    evicted = sum(map(len, found[1].values()))
    roomy = ReplicaSettings(max_batch_size=8, max_num_tokens=512, kv_cache_tokens=1 << 20)
    reused = [record(trace, settings, "prefix", None)[0][1] for settings in (replica, roomy)]
    assert evicted > 1000 and reused[1] - 10_000 > reused[0] > 10_000
    simulator = Simulator(3, replica, TIMES, index_answers=False)
    simulator.run(request.arrival(64, repeated_blocks(trace)) for request in trace)
    caches = [each.scheduler.kv_cache for each in simulator._replicas.values()]
    assert sum(len(cache.index) for cache in caches if cache.index is not None) < 0.5 * sum(
        sum(cache.pool._is_reusable) for cache in caches
    )


def write_trace(file: Path, trace: list[TracedRequest]) -> None:
    rows = [
        {"timestamp": 1000 * r.at_s, "input_length": r.num_prompt, "output_length": r.max_tokens, "hash_ids": r.block_ids} for r in trace
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fleet_indexes_the_blocks_that_the_requests_of_its_routers_repeat(workers: int, tmp_path: Path) -> None:
    """Each worker reads the lines of its routers only. Blank lines are no requests."""
    file = tmp_path / "trace.jsonl"
    write_trace(file, list(requests(random.Random(3), 300, 6)))
    trace = [request for request in read_trace(file, "mooncake") if request is not None]
    replica = ReplicaSettings(max_batch_size=8, max_num_tokens=512, kv_cache_tokens=16384)
    fleet = FleetSettings(num_replicas=6, num_routers=3, replica=replica, step_times=TIMES)
    results = simulate_fleet(fleet, TraceSettings(file=file, rate=2.0, max_requests=250), workers)
    routers = (0, 2, 1) if workers == 2 else (0, 1, 2)  # in the order in which their results are added
    expected, *others = (
        Simulator(2, replica, TIMES, index_answers=False).run(request.arrival(64, rate=2.0) for request in trace[router:250:3])
        for router in routers
    )
    for part in others:
        expected.merge(part)
    assert numbers(results) == numbers(expected) and results.num_reused_tokens > 10_000


def test_a_malformed_line_of_any_router_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, list(requests(random.Random(3), 7, 6)))
    file.write_text(file.read_text() + "\n{}")
    fleet = FleetSettings(num_replicas=3, num_routers=3, replica=ReplicaSettings(max_batch_size=8), step_times=TIMES)
    with pytest.raises(ConfigError, match=r"trace.jsonl:14: .*timestamp"):
        simulate_fleet(fleet, TraceSettings(file=file), 2)
    assert len(simulate_fleet(fleet, TraceSettings(file=file, max_requests=7), 2).duration_s) == 7
