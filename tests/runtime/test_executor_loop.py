"""The step loop: deadlines, cancellation, limits, failures that affect only their own requests, and hung steps."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drive import Driven, request
from torch import Tensor

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.types import FinishReason
from stoker.runtime.client import Cancel, Pause, Shutdown
from stoker.runtime.load import load_executor
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox

Make = Callable[..., Driven]


def test_a_deadline_ends_waiting_and_running_sequences(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive(max_batch_size=1)
    late, running = request(prompts[0], timeout_s=0.0), request(prompts[1], max_tokens=60, timeout_s=1000.0)
    driven.submit(running, late)
    for _ in range(3):
        driven.turn()
    assert driven.answers[late.request_id, 0].reason is FinishReason.DEADLINE
    answer = driven.answers[running.request_id, 0]
    assert answer.tokens and answer.reason is None
    (seq,) = driven.executor.scheduler._requests[running.request_id]
    seq.deadline = driven.executor.scheduler._next_deadline = 0.0
    driven.turn()
    assert answer.reason is FinishReason.DEADLINE and driven.stats.num_cancelled == 2
    driven.check_idle()


def test_cancelling_frees_blocks_within_a_step(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive()
    parallel, other = request(prompts[1], n=3, max_tokens=60), request(prompts[3], max_tokens=8)
    driven.submit(parallel, other)
    for _ in range(3):
        driven.turn()
    held = driven.stats.num_blocks - driven.stats.num_free_blocks
    driven.send(Cancel(parallel.request_id, 1), Cancel("unknown"))
    driven.turn()
    assert driven.answers[parallel.request_id, 1].reason is FinishReason.CANCELLED
    assert driven.answers[parallel.request_id, 0].reason is None
    driven.send(Cancel(parallel.request_id))
    driven.turn()
    assert all(driven.answers[parallel.request_id, index].reason is FinishReason.CANCELLED for index in range(3))
    assert driven.stats.num_blocks - driven.stats.num_free_blocks < held
    driven.finish()
    assert len(driven.answers[other.request_id, 0].tokens) == 8


def test_a_full_queue_rejects_requests_with_a_retry_time(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive(max_batch_size=1, max_queue_size=2)
    requests = [request(prompts[0], max_tokens=3) for _ in range(5)]
    driven.submit(*requests)
    driven.finish()
    errors = [driven.answers[one.request_id, 0].error for one in requests]
    assert [error is None for error in errors] == [True, True, False, False, False]
    assert errors[4] is not None and (errors[4].status, errors[4].code) == (429, "queue_full") and errors[4].retry_after_s >= 1.0
    (again,) = driven.run(request(prompts[0], max_tokens=3))
    assert again.reason is FinishReason.LENGTH


def test_a_request_id_in_flight_is_rejected(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive()
    first = request(prompts[0], max_tokens=4, request_id="same")
    driven.submit(first)
    driven.turn()
    with pytest.raises(Exception, match="in flight"):
        driven.executor.admission.admit(first)
    driven.finish()


def test_a_paused_executor_admits_nothing_and_drains(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive()
    running, waiting = request(prompts[0], max_tokens=6), request(prompts[1], max_tokens=2)
    driven.submit(running)
    driven.turn()
    driven.send(Pause(True))
    driven.submit(waiting)
    driven.finish(until=lambda: driven.answers[running.request_id, 0].reason is not None)
    assert not driven.answers[waiting.request_id, 0].tokens and driven.stats.num_waiting == 1
    driven.send(Pause(False))
    driven.finish()
    rejected = request(prompts[0])
    draining = request(prompts[1], max_tokens=9)
    driven.submit(draining)
    driven.turn()
    driven.send(Shutdown(drain=True))
    driven.submit(rejected)
    driven.finish()
    error = driven.answers[rejected.request_id, 0].error
    assert error is not None and error.status == 503
    assert driven.answers[draining.request_id, 0].reason is FinishReason.LENGTH


def test_an_immediate_shutdown_cancels_all_requests(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive(max_batch_size=1)
    requests = [request(prompts[0], max_tokens=50) for _ in range(3)]
    driven.submit(*requests)
    driven.turn()
    driven.send(Shutdown(drain=False))
    driven.turn()
    assert [driven.answers[one.request_id, 0].reason for one in requests] == [FinishReason.CANCELLED] * 3


class Poisoner:
    """Makes the logits and the new cache entries of the requests in `names` NaN."""

    def __init__(self, driven: Driven) -> None:
        self.runner: Any = driven.executor.runner
        self.names: set[str] = set()
        self.model = self.runner.model
        self.plan: Any = None
        launch = self.runner.launch

        def recorded(plan: Any) -> Any:
            self.plan = plan
            return launch(plan)

        self.runner.launch, self.runner.model = recorded, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, batch: Any, caches: list[Any]) -> Tensor:
        logits = self.model(batch, caches)
        for row, seq in enumerate(self.plan.sequences):
            if seq.request_id in self.names:
                logits[sum(self.plan.samples[:row])] = float("nan")
                for cache in caches:
                    for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                        slot = int(batch.slots[index])
                        cache.keys[slot // cache.block_size, :, slot % cache.block_size] = float("nan")
                        cache.values[slot // cache.block_size, :, slot % cache.block_size] = float("nan")
        return logits


def test_nan_logits_end_only_their_own_request_and_affect_no_other_sequence(drive: Make, prompts: list[list[int]]) -> None:
    clean = drive()
    expected = {tuple(prompt): clean.run(request(prompt, max_tokens=10))[0].tokens for prompt in prompts}
    driven = drive(kv_cache_tokens=12 * 16)
    poisoner = Poisoner(driven)
    shared = prompts[1]
    bad = request(shared, max_tokens=10)
    twin = request([*shared[:32], *prompts[0]], max_tokens=10)  # shares two full blocks with the bad request
    driven.run(request(shared, max_tokens=1))
    expected_twin = clean.run(request(twin.prompt_ids, max_tokens=10))[0].tokens
    other = request(prompts[3], max_tokens=10)
    driven.submit(bad, other, twin)
    driven.turn()
    poisoner.names = {bad.request_id}
    driven.finish()
    driven.turn()
    failed = driven.answers[bad.request_id, 0]
    assert failed.reason is FinishReason.ERROR and failed.error is not None and failed.error.code == "bad_logits"
    assert 0 < len(failed.tokens) < 10
    assert driven.answers[other.request_id, 0].tokens == expected[tuple(prompts[3])]
    assert driven.answers[twin.request_id, 0].tokens == expected_twin
    caches = driven.executor.runner.caches  # type: ignore[attr-defined]
    assert all(torch.isfinite(cache.keys).all() and torch.isfinite(cache.values).all() for cache in caches), "a block contains NaN"
    answers = driven.run(*(request(prompt, max_tokens=10) for prompt in prompts))
    assert [answer.tokens for answer in answers] == list(expected.values())
    assert answers[1].cached <= 32, "blocks of the failed sequence are shared"


def test_blocks_are_zeroed_and_not_cached_if_all_sequences_fail(drive: Make, prompts: list[list[int]]) -> None:
    driven = drive()
    poisoner = Poisoner(driven)
    requests = [request([*prompts[1], 5], max_tokens=4), request([*prompts[1], 6], max_tokens=4)]
    poisoner.names = {one.request_id for one in requests}
    assert [answer.reason for answer in driven.run(*requests)] == [FinishReason.ERROR] * 2
    driven.turn()
    assert all(torch.isfinite(cache.keys).all() for cache in driven.executor.runner.caches)  # type: ignore[attr-defined]
    assert driven.stats.num_cached_blocks == 0 and driven.stats.num_failed == 2


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_step_that_raises_ends_only_its_rows(drive: Make, prompts: list[list[int]], where: str) -> None:
    """With two steps in flight, the rows of the failed one end. The other step and waiting sequences continue."""
    expected = [answer.tokens for answer in drive(max_batch_size=2).run(*(request(prompt, max_tokens=6) for prompt in prompts))]
    driven = drive(max_batch_size=2)
    driven.executor._depth = 2
    runner: Any = driven.executor.runner
    launch, count = runner.launch, 0

    class Broken:
        def wait(self) -> Any:
            raise RuntimeError("device failure")

    def breaking(plan: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            if where == "launch":
                raise RuntimeError("device failure")
            return Broken()
        for seq in plan.sequences:
            seq.waits_for_ids = True  # a CPU runner cannot resolve ids that the host does not know
        return launch(plan)

    runner.launch = breaking
    answers = driven.run(*(request(prompt, max_tokens=6, bad_words=((319, 319),)) for prompt in prompts))
    failed = [answer for answer in answers if answer.reason is FinishReason.ERROR]
    assert 0 < len(failed) <= 2 and all(answer.error is not None and "device failure" in answer.error.message for answer in failed)
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.tokens == tokens[: len(answer.tokens)] and (answer in failed or len(answer.tokens) == 6)
    assert [answer.tokens for answer in driven.run(*(request(prompt, max_tokens=6) for prompt in prompts))] == expected


def test_an_error_before_the_first_step_affects_no_other_request(
    drive: Make, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = drive()
    runner: Any = driven.executor.runner
    add, rejected = runner.sampler.add, []

    def failing(seq: Any) -> None:
        add(seq)
        if seq.index == 1 and seq.params.n == 2:
            rejected.append(seq)
            raise MemoryError("no room")

    monkeypatch.setattr(runner.sampler, "add", failing)
    *both, fine = driven.run(request(prompts[0], n=2, max_tokens=3, presence_penalty=1.0), request(prompts[1], max_tokens=3))
    assert rejected and [answer.reason for answer in both] == [FinishReason.ERROR] * 2
    assert both[0].error is not None and (both[0].error.status, both[0].error.code) == (500, "internal_error")
    assert fine.reason is FinishReason.LENGTH


async def test_a_hung_step_is_not_ready_and_is_logged_with_stacks(
    tiny_engine: Any, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    config = RuntimeConfig(device="cpu", kv_cache_tokens=512, num_threads=1, step_timeout_s=1.0)
    executor = load_executor(tiny_engine, config, InProcessMailbox)
    mailbox, release, launch = executor.mailbox, threading.Event(), executor.runner.launch
    assert isinstance(mailbox, InProcessMailbox) and executor.info.step_timeout_s == 1.0

    def hanging(plan: Any) -> Any:
        release.wait(20)
        return launch(plan)

    executor.runner.launch = hanging  # type: ignore[method-assign]
    thread = threading.Thread(target=executor.run)
    thread.start()
    client = InProcessClient(mailbox)
    hung = request(prompts[0], max_tokens=2)
    task = asyncio.create_task(_collect(client, hung))
    with caplog.at_level(logging.ERROR):
        assert client.alive
        await _until(lambda: not client.alive and executor.watchdog.num_hangs == 1)
        release.set()
        assert await task == 2
    assert client.alive
    mailbox.put(Shutdown(drain=True))
    await asyncio.to_thread(thread.join)
    (message,) = [record.getMessage() for record in caplog.records if "has not ended" in record.getMessage()]
    assert hung.request_id in message and "row 0" in message and "blocks free" in message and "hanging" in message
    await client.close()


async def _collect(client: InProcessClient, submitted: Any) -> int:
    return sum([len(output.token_ids) async for outputs in client.generate(submitted) for output in outputs])


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


@pytest.mark.parametrize("value", [0.0, 0.5, -1.0, 1e9, float("nan")])
def test_a_step_timeout_out_of_range_is_rejected(value: float) -> None:
    with pytest.raises(ConfigError, match="step_timeout_s"):
        RuntimeConfig(step_timeout_s=value)


def test_a_queue_size_of_zero_is_rejected() -> None:
    """An idle server would reject every request too."""
    with pytest.raises(ConfigError, match="max_queue_size"):
        RuntimeConfig(max_queue_size=0)
