"""What the executor reports about its sequences, its KV blocks and its steps, and that a step is recorded once in bounded memory."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from stub_runner import INFO, StubRunner, stub_executor

from stoker.base.types import SamplingParams
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime import step_history
from stoker.runtime.executor import Executor
from stoker.runtime.kv.block_pool import BlockPool
from stoker.runtime.live_state import MAX_STEP_ROWS, MAX_STEPS, EndedSequences, LiveQuery, LiveState, live_state
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.step_history import StepHistory
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox


def request(name: str, num_prompt: int, max_tokens: int = 4, **changes: Any) -> TokenRequest:
    params = SamplingParams(max_tokens=max_tokens, n=changes.pop("n", 1))
    return TokenRequest(request_id=name, prompt_ids=list(range(100, 100 + num_prompt)), params=params, **changes)


def driven() -> tuple[Executor, SynchronousMailbox]:
    mailbox = SynchronousMailbox(INFO)
    return stub_executor(mailbox, StubRunner([7] * 600, 0)), mailbox


def state_of(executor: Executor, first_step: int | None = 0) -> LiveState:
    query, preparing = LiveQuery("client", 1, True, first_step), executor.admission.preparing()
    return live_state(executor.snapshot(), executor.scheduler, preparing, executor.step_history, executor.ended, query)


def test_steps_show_which_sequence_computed_how_many_tokens() -> None:
    executor, mailbox = driven()
    mailbox.submit([request("client:1:long", 100), request("client:2:two:parts", 10, n=2)])
    while executor.is_busy or mailbox.messages:
        executor.turn(0.0)
    state = state_of(executor)
    assert state.names == {0: "long", 1: "two:parts [0]", 2: "two:parts [1]"}
    sets = [state.row_sets[step.rows] for step in state.steps]
    rows = [dict(zip(ids, [1] * step.num_decodes + step.num_new, strict=True)) for step, ids in zip(state.steps, sets, strict=True)]
    assert [step.tokens for step in executor.step_history.steps()] == [sum(row.values()) for row in rows]
    assert rows[0] == {0: 64} and rows[1] == {0: 36, 1: 10, 2: 10}  # chunks of 64 tokens
    assert rows[2:] == [{0: 1, 1: 1, 2: 1}] * 3
    for seq_id, num_prompt in ((0, 100), (1, 10), (2, 10)):
        assert sum(row.get(seq_id, 0) for row in rows) == num_prompt + 3  # the last token is sampled, not computed
    assert [step.number for step in state.steps] == list(range(5)) and state.next_step == 5
    assert [(step.num_decodes, step.num_verifies) for step in state.steps] == [(0, 0), (0, 0), (3, 0), (3, 0), (3, 0)]
    assert sum(step.duration_s for step in state.steps) == pytest.approx(state.stats.busy_time_s)
    assert [step.number for step in state_of(executor, 4).steps] == [4] and state_of(executor, None).steps == []


def test_sequences_and_blocks() -> None:
    executor, mailbox = driven()
    mailbox.submit([request("a", 20, max_tokens=9)])
    for _ in range(3):
        executor.turn(0.0)
    mailbox.submit([request(f"w{i}", 60, max_tokens=400) for i in range(12)])
    executor.turn(0.0)
    state = state_of(executor)
    first = state.running[0]
    assert (first.request_id, first.prompt_tokens, first.generated_tokens, first.num_blocks) == ("a", 20, 4, 2)
    assert (first.status, first.max_tokens, first.cached_tokens) == ("running", 9, 0) and first.age_s > 0
    assert len(state.running) + len(state.waiting) == 13
    assert [seq.request_id for seq in state.waiting] == [f"w{i}" for i in range(12) if f"w{i}" not in {s.request_id for s in state.running}]
    (device,) = state.tiers
    refs = executor.scheduler.kv_cache.pool.refs
    assert device.name == "device" and device.blocks_per_cell == 1 and device.num_blocks == len(device.used) == 256
    assert device.used == [int(count > 0) for count in refs] and device.shared == [int(count > 1) for count in refs]
    assert sum(device.used) == state.stats.num_blocks - state.stats.num_free_blocks


def test_a_cell_counts_several_blocks() -> None:
    pool = BlockPool(10)
    blocks = [pool.allocate() for _ in range(6)]
    pool.acquire(blocks[4])
    for block in blocks[:3]:
        pool.mark_reusable([block])
    pool.release(blocks[0])
    pool.release(blocks[5])
    occupancy = pool.occupancy(4)
    assert occupancy.blocks_per_cell == 3 and sum(occupancy.cached) == pool.num_cached == 1
    assert (occupancy.used, occupancy.shared, occupancy.cached) == ([2, 2, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0])


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "CAPACITY", 8)
    history = StepHistory()
    plans = [plan_of(*range(i % 3, 4)) for i in range(20)]
    for plan in plans:
        history.record(plan)
    retained = list(history.steps())
    assert [step.number for step in retained] == list(range(12, 20)) and history.num_steps == 20
    assert [step.seq_ids for step in retained] == [[seq.seq_id for seq in plan.sequences] for plan in plans[12:]]
    assert [step.number for step in history.steps(18)] == [18, 19]


def test_an_answer_has_a_limited_number_of_steps_and_rows() -> None:
    executor, _ = driven()
    for _ in range(2 * MAX_STEPS):
        executor.step_history.record(plan_of(1, 2))
    assert [step.number for step in state_of(executor).steps] == list(range(MAX_STEPS, 2 * MAX_STEPS))
    for _ in range(8):
        executor.step_history.record(plan_of(*range(MAX_STEP_ROWS // 3)))
    assert len(state_of(executor).steps) == 3


def test_equal_rows_share_one_list_and_ended_sequences_are_bounded() -> None:
    history = StepHistory()
    plan = plan_of(3, 4)
    again = StepPlan()
    again.sequences, again.num_decodes, again.num_tokens, again.num_new = list(plan.sequences), 2, 2, [1, 1]
    history.record(plan)
    history.record(again)
    first, second = history.steps()
    assert first.seq_ids is second.seq_ids
    ended = EndedSequences()
    for seq_id in range(3000):
        ended.add(Sequence(seq_id, request(f"c:1:r{seq_id}", 1), 0, 0.0))
    assert len(ended.names()) == 1024 and ended.names()[2999] == "r2999"


def plan_of(*seq_ids: int) -> StepPlan:
    """A step in which each sequence decodes one token."""
    plan = StepPlan()
    plan.sequences = [Sequence(seq_id, request("r", 1), 0, 0.0) for seq_id in seq_ids]
    plan.num_new, plan.num_decodes, plan.num_tokens = [1] * len(seq_ids), len(seq_ids), len(seq_ids)
    return plan


@pytest.mark.parametrize("kind", ["in process", "zmq"])
async def test_both_transports_return_the_state(kind: str) -> None:
    mailbox = InProcessMailbox(INFO) if kind == "in process" else ZmqMailbox("tcp://127.0.0.1:*", INFO)
    thread = threading.Thread(target=stub_executor(mailbox, StubRunner([7] * 600, 0, step_s=0.01)).run, daemon=True)
    thread.start()
    client = InProcessClient(mailbox) if isinstance(mailbox, InProcessMailbox) else await ZmqExecutorClient.connect(mailbox.address)
    try:
        outputs = client.generate(request("mine", 20, max_tokens=500))
        await anext(outputs)
        state = await client.live(detail=True, first_step=0)
        assert [seq.request_id for seq in state.running] == ["mine"] and state.names == {0: "mine"}
        assert state.steps[0].num_new == [20] and state.time_s >= state.steps[-1].end_s
        brief = await client.live()
        assert brief.steps == brief.running == brief.tiers == [] and (await client.stats()).num_running == 1
        await outputs.aclose()
    finally:
        client.shutdown(drain=False)
        await asyncio.to_thread(thread.join, 20)
        await client.close()
    assert not thread.is_alive()
