"""A frontend that loses contact with its executor, because one of them was suspended, uses it again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fake_executor import FakeExecutor, info
from test_executor_transport import collect, make_request, until

from stoker.base.errors import UnavailableError
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox

TIMEOUT_S = 0.5  # of both ends; a suspension is longer


def _executor_process(pipe: Connection) -> None:
    """An executor. For each message of the pipe, it sends the number of running sequences."""
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info(max_output_len=100_000))
    executor = FakeExecutor(mailbox, lambda request, index: [7] * 100_000, step_s=0.002)
    pipe.send(mailbox.address)
    while pipe.recv():
        pipe.send(len(executor.running))


def _frontend_process(address: str, pipe: Connection) -> None:
    """A frontend: for each message of the pipe, run a request and send its outputs or the error."""

    async def run() -> None:
        client = await ZmqExecutorClient.connect(address, heartbeat_s=TIMEOUT_S / 5, timeout_s=30.0)
        while await asyncio.to_thread(pipe.recv):
            try:
                pipe.send(await collect(client, make_request(max_tokens=5)))
            except UnavailableError as error:
                pipe.send(str(error))

    asyncio.run(run())


@contextlib.contextmanager
def spawned(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Any]]:
    """A process that runs `target` with these arguments and a pipe: its id, and the other end of the pipe."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    try:
        yield process.pid or 0, pipe
    finally:
        process.kill()
        process.join()


async def test_an_executor_that_was_suspended_is_used_again() -> None:
    with spawned(_executor_process) as (pid, pipe):
        async with asyncio.timeout(30):
            await suspend_executor(pid, pipe)


async def suspend_executor(pid: int, pipe: Any) -> None:
    client = await ZmqExecutorClient.connect(await asyncio.to_thread(pipe.recv), heartbeat_s=TIMEOUT_S / 5, timeout_s=TIMEOUT_S)
    running = asyncio.create_task(collect(client, make_request("endless", max_tokens=100_000)))

    async def num_running() -> int:
        pipe.send(True)
        return int(await asyncio.to_thread(pipe.recv))

    while not await num_running():
        pass
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(UnavailableError, match=r"it did not answer for 0\.5 s"):
        await asyncio.wait_for(running, 10)
    assert not client.alive
    with pytest.raises(UnavailableError):
        await collect(client, make_request())
    os.kill(pid, signal.SIGCONT)
    await until(lambda: client.alive)
    assert await collect(client, make_request(max_tokens=5)) == {0: [7] * 5}
    while await num_running():  # the request that failed is cancelled
        pass
    await client.close()


async def test_a_frontend_that_was_suspended_is_connected_again() -> None:
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info(), client_timeout_s=TIMEOUT_S)
    executor = FakeExecutor(mailbox, lambda request, index: [7] * 100)
    with spawned(_frontend_process, mailbox.address) as (pid, pipe):
        async with asyncio.timeout(30):
            await suspend_frontend(mailbox, pid, pipe)
    executor.stop()


async def suspend_frontend(mailbox: ZmqMailbox, pid: int, pipe: Any) -> None:
    pipe.send(True)
    assert await asyncio.to_thread(pipe.recv) == {0: [7] * 5}
    assert len(mailbox._peers) == 1
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: not mailbox._peers)  # ZeroMQ has closed the connection
    os.kill(pid, signal.SIGCONT)
    results = []
    while not results or isinstance(results[-1], str):
        pipe.send(True)
        results.append(await asyncio.to_thread(pipe.recv))
    assert results[-1] == {0: [7] * 5}
