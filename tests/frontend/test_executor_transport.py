"""Both transports between a frontend and the executor behave the same."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_executor import FakeExecutor, info

from stoker.base.errors import ConfigError, RequestError, UnavailableError
from stoker.base.types import AdmissionRecord, FinishReason, SamplingParams
from stoker.runtime.client import ExecutorClient, Mailbox, Message
from stoker.runtime.request import SequenceOutput, TokenRequest
from stoker.runtime.transport import in_process
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox

Connect = Callable[[], "asyncio.Future[ExecutorClient]"]


def make_request(request_id: str = "r", **params: int) -> TokenRequest:
    return TokenRequest(request_id=request_id, prompt_ids=[1, 2, 3], params=SamplingParams(**{"max_tokens": 20, **params}))


def make_mailbox(kind: str) -> Mailbox:
    return InProcessMailbox(info()) if kind == "inprocess" else ZmqMailbox("tcp://127.0.0.1:*", info())


async def connect(mailbox: Mailbox, **options: float) -> ExecutorClient:
    if isinstance(mailbox, ZmqMailbox):
        return await ZmqExecutorClient.connect(mailbox.address, **options)
    assert isinstance(mailbox, InProcessMailbox)
    return InProcessClient(mailbox, **options)


@asynccontextmanager
async def running(kind: str, *, step_s: float = 0.0, group: int = 1) -> AsyncIterator[tuple[FakeExecutor, Mailbox]]:
    mailbox = make_mailbox(kind)
    executor = FakeExecutor(mailbox, lambda request, index: [index] * 1000, step_s=step_s, group=group)
    try:
        yield executor, mailbox
    finally:
        executor.stop()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def collect(client: ExecutorClient, request: TokenRequest) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    async for outputs in client.generate(request):
        for output in outputs:
            assert output.request_id == request.request_id
            ids.setdefault(output.index, []).extend(output.token_ids)
    return ids


both = pytest.mark.parametrize("kind", ["inprocess", "zmq"])


@both
def test_another_thread_ends_the_wait_for_a_message(kind: str) -> None:
    mailbox = make_mailbox(kind)
    found: list[list[Message]] = []
    for num_wakes in (1, 100_000):  # more than fit into the buffer of a socket
        thread = threading.Thread(target=lambda: found.append(mailbox.poll(3600.0)), daemon=True)
        thread.start()
        for _ in range(num_wakes):
            mailbox.wake()
        thread.join(30.0)
        assert not thread.is_alive()
    assert found == [[], []]
    mailbox.close()
    mailbox.wake()  # has no effect


@both
async def test_many_requests_of_several_clients_with_equal_ids(kind: str) -> None:
    async with running(kind) as (executor, mailbox):
        clients = [await connect(mailbox) for _ in range(3)]
        answers = await asyncio.gather(*(collect(client, make_request(f"{i}", n=2)) for client in clients for i in range(10)))
        assert answers == [{0: [0] * 20, 1: [1] * 20}] * 30
        assert len({request.request_id for request in executor.requests}) == 30
        assert clients[0].info == info()
        for client in clients:
            await client.close()
        assert executor.cancelled == []


class CountedLoop:
    """The calls that the executor's thread schedules in an event loop."""

    def __init__(self, client: InProcessClient) -> None:
        self.count, self._loop = 0, client._loop
        client._loop = self  # type: ignore[assignment]

    def call_soon_threadsafe(self, *args: Any) -> None:
        self.count += 1
        self._loop.call_soon_threadsafe(*args)


def output(request_id: str, token: int, **values: Any) -> SequenceOutput:
    return SequenceOutput(request_id, 0, [token], **values)


async def test_outputs_of_requests_that_are_not_streamed_are_delivered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "WHOLE_DELAY_S", 1000.0)
    mailbox = InProcessMailbox(info())
    client = InProcessClient(mailbox)
    counted = CountedLoop(client)
    client._posted_s = time.monotonic()
    found = asyncio.create_task(collect(client, msgspec.structs.replace(make_request(), whole=True)))
    await until(lambda: bool(client._streams))
    (wire_id,) = client._streams
    mailbox.send([output(wire_id, 0, admission=AdmissionRecord(0.0, 0.0, 0, 0))])  # the first one is timed
    assert counted.count == 1
    for token in range(1, 5):
        mailbox.send([output(wire_id, token)])
    assert counted.count == 1
    mailbox.send([output(wire_id, 5, finish_reason=FinishReason.LENGTH)])
    assert await found == {0: [0, 1, 2, 3, 4, 5]} and counted.count == 2


async def test_outputs_wait_for_a_limited_time_and_not_at_all_if_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for whole, delay_s in ((True, 0.0), (False, 1000.0)):
        monkeypatch.setattr(in_process, "WHOLE_DELAY_S", delay_s)
        mailbox = InProcessMailbox(info())
        client = InProcessClient(mailbox)
        counted = CountedLoop(client)
        found = asyncio.create_task(collect(client, msgspec.structs.replace(make_request(), whole=whole)))
        await until(lambda client=client: bool(client._streams))  # type: ignore[misc]
        (wire_id,) = client._streams
        for token in range(4):
            mailbox.send([output(wire_id, token)])
            assert counted.count == token + 1
        mailbox.send([output(wire_id, 4, finish_reason=FinishReason.STOP)])
        assert await found == {0: [0, 1, 2, 3, 4]}


async def test_outputs_before_the_end_of_an_executor_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "WHOLE_DELAY_S", 1000.0)
    mailbox = InProcessMailbox(info())
    client = InProcessClient(mailbox)
    client._posted_s = time.monotonic()
    outputs = client.generate(msgspec.structs.replace(make_request(), whole=True))
    arrived = asyncio.ensure_future(anext(outputs))
    await until(lambda: bool(client._streams))
    (wire_id,) = client._streams
    mailbox.send([output(wire_id, 7)])
    mailbox.close("it ended")
    assert [found.token_ids for found in await arrived] == [[7]]
    with pytest.raises(UnavailableError, match="it ended"):
        await anext(outputs)


@both
async def test_leaving_cancels_within_a_step(kind: str) -> None:
    async with running(kind, step_s=0.002) as (executor, mailbox):
        client = await connect(mailbox)
        async for _ in client.generate(make_request(max_tokens=1000)):
            break
        await until(lambda: not executor.running and len(executor.cancelled) == 1)
        await client.close()


@both
async def test_cancel_one_sequence_then_all(kind: str) -> None:
    async with running(kind, step_s=0.002) as (executor, mailbox):
        client = await connect(mailbox)
        reasons: dict[int, FinishReason] = {}
        async for outputs in client.generate(make_request(max_tokens=1000, n=2)):
            if not executor.cancelled:
                client.cancel("r", 1)
            for output in outputs:
                if output.finish_reason is not None:
                    reasons[output.index] = output.finish_reason
                    client.cancel("r")
        assert reasons == {0: FinishReason.CANCELLED, 1: FinishReason.CANCELLED}
        client.cancel("unknown")
        await client.close()


@both
async def test_stats_pause_shutdown_and_duplicates(kind: str) -> None:
    async with running(kind, step_s=0.002) as (executor, mailbox):
        client = await connect(mailbox)
        stream = client.generate(make_request(max_tokens=1000))
        await anext(stream)
        assert (await client.stats()).num_running == 1
        with pytest.raises(RequestError, match="in flight"):
            await anext(client.generate(make_request()))
        client.pause(True)
        await until(lambda: executor.paused)
        assert client.alive
        client.shutdown()  # type: ignore[attr-defined]
        await until(lambda: not executor._thread.is_alive())
        await stream.aclose()
        await client.close()


@both
async def test_closing_the_mailbox_fails_pending_requests(kind: str) -> None:
    mailbox = make_mailbox(kind)
    answering = threading.Thread(target=lambda: [mailbox.poll(0.05) for _ in range(10)])
    answering.start()
    client = await connect(mailbox)
    waiting = asyncio.create_task(collect(client, make_request()))
    stats = asyncio.create_task(client.stats())
    await asyncio.to_thread(answering.join)
    mailbox.close("it is upgraded")
    for task in (waiting, stats):
        with pytest.raises(UnavailableError, match="it is upgraded"):
            await task
    assert not client.alive
    with pytest.raises(UnavailableError):
        await collect(client, make_request())
    await client.close()


@both
async def test_closing_a_client_cancels_its_requests_only(kind: str) -> None:
    async with running(kind, step_s=0.002) as (executor, mailbox):
        closing, other = await connect(mailbox), await connect(mailbox)
        failing = asyncio.create_task(collect(closing, make_request(max_tokens=1000)))
        continuing = asyncio.create_task(collect(other, make_request(max_tokens=60)))
        await until(lambda: len(executor.running) == 2)
        await closing.close()
        await until(lambda: len(executor.running) == 1)
        with pytest.raises(UnavailableError, match="closed"):
            await failing
        assert await continuing == {0: [0] * 60}
        await other.close()


@both
async def test_a_loop_that_hangs_is_not_alive(kind: str) -> None:
    mailbox = make_mailbox(kind)
    first = threading.Thread(target=lambda: [mailbox.poll(0.05) for _ in range(4)])
    first.start()
    options = {"timeout_s": 0.3} | ({"heartbeat_s": 0.05} if kind == "zmq" else {})
    client = await connect(mailbox, **options)
    assert client.alive
    await asyncio.to_thread(first.join)
    await until(lambda: not client.alive)
    mailbox.close()
    await client.close()


def _executor_process(pipe: object) -> None:
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info())
    pipe.send(mailbox.address)  # type: ignore[attr-defined]
    while True:
        mailbox.poll(1.0)


def _frontend_process(address: str) -> None:
    async def run() -> None:
        client = await ZmqExecutorClient.connect(address)
        await collect(client, make_request(max_tokens=1000))

    asyncio.run(run())


async def test_an_executor_process_that_dies_fails_its_requests_at_once() -> None:
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_executor_process, args=(theirs,), daemon=True)
    process.start()
    client = await ZmqExecutorClient.connect(await asyncio.to_thread(mine.recv))
    waiting = asyncio.create_task(collect(client, make_request()))
    await asyncio.sleep(0)
    os.kill(process.pid or 0, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="its process ended"):
        await asyncio.wait_for(waiting, 10)
    await client.close()
    process.join()


async def test_requests_of_a_dead_frontend_process_are_cancelled() -> None:
    async with running("zmq", step_s=0.005) as (executor, mailbox):
        assert isinstance(mailbox, ZmqMailbox)
        process = multiprocessing.get_context("spawn").Process(target=_frontend_process, args=(mailbox.address,), daemon=True)
        process.start()
        await until(lambda: bool(executor.running))
        os.kill(process.pid or 0, signal.SIGKILL)
        await until(lambda: not executor.running and len(executor.cancelled) == 1)
        process.join()


def test_requests_of_a_frontend_without_heartbeats_are_cancelled() -> None:
    """A socket that is open and sends no heartbeats, as of a frozen process."""
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info(), client_timeout_s=0.2)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, b"a" * 12)
    socket.connect(mailbox.address)
    request = msgspec.structs.replace(make_request(), request_id="a" * 12 + ":r")
    socket.send(msgspec.msgpack.encode([["Submit", request]]))
    assert [type(message).__name__ for message in mailbox.poll(5.0)] == ["Submit"]
    start = time.monotonic()
    (cancel,) = mailbox.poll(5.0)
    assert cancel.request_id == "a" * 12 + ":r"  # type: ignore[union-attr]
    assert time.monotonic() - start < 4
    context.destroy(linger=0)
    mailbox.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\x00junk",
        msgspec.msgpack.encode([["Submit", 5]]),
        msgspec.msgpack.encode([["Unknown"]]),
        msgspec.msgpack.encode([["Cancel", "other-client:r", None]]),
        msgspec.msgpack.encode([["Submit", {"request_id": "a" * 12 + ":r", "prompt_ids": [1], "params": {"max_tokens": -1}}]]),
    ],
)
def test_malformed_messages_are_refused(payload: bytes) -> None:
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info())
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, b"a" * 12)
    socket.connect(mailbox.address)
    socket.send(payload)
    deadline = time.monotonic() + 5
    while not socket.poll(0) and time.monotonic() < deadline:
        assert mailbox.poll(0.05) == []
    kind, reason = msgspec.msgpack.decode(socket.recv(zmq.NOBLOCK))
    assert kind == "Closed"
    assert "refused a message" in reason
    context.destroy(linger=0)
    mailbox.close()


async def test_ipc_address_and_no_answer(tmp_path: Path) -> None:
    mailbox = ZmqMailbox(f"ipc://{tmp_path}/x", info())
    loop = threading.Thread(target=lambda: [mailbox.poll(0.05) for _ in range(6)])
    loop.start()
    client = await ZmqExecutorClient.connect(f"ipc://{tmp_path}/x")
    await client.close()
    await asyncio.to_thread(loop.join)
    mailbox.close()
    with pytest.raises(UnavailableError, match="No executor answers"):
        await ZmqExecutorClient.connect(f"ipc://{tmp_path}/none", connect_timeout_s=0.1)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:1", "udp://127.0.0.1:1", "ipc://" + "x" * 200])
def test_addresses_beyond_this_machine_are_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        ZmqMailbox(address, info())
