"""Connections that arrive while a process has no free descriptors wait, and are answered afterwards."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from stoker.server.http.accepting import Acceptor


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


async def accept_without_descriptors() -> int:
    """Connect a client while no descriptor can be opened. Returns the number of pauses."""
    pauses = 0
    paused = asyncio.Event()

    def note() -> None:
        nonlocal pauses
        pauses += 1
        paused.set()

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            acceptor = Acceptor(listener, Greeter, None, note)
            await paused.wait()
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # neither closed nor reset
                client.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await asyncio.get_running_loop().sock_recv(client, 10) == b"hello"
        acceptor.close()
        with socket.create_connection(listener.getsockname()) as late:
            late.setblocking(False)
            await asyncio.sleep(0)
            with pytest.raises(BlockingIOError):  # waits for another process that accepts
                late.recv(1)
    return pauses


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_wait_for_free_descriptors(run: Callable[[Coroutine[Any, Any, int]], int], caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stoker").propagate = True
    assert run(asyncio.wait_for(accept_without_descriptors(), 30)) >= 1  # type: ignore[arg-type]
    messages = [record.message for record in caplog.records if record.name.endswith("http.accepting")]
    assert len(messages) == 1 and "no connection can be accepted: Too many open files" in messages[0]
