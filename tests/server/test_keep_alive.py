"""The keep-alive time: a request that has arrived is read before the connection is closed, and a lost connection is forgotten at once."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from typing import Any
from unittest.mock import Mock

import pytest
from live_http import live_server, until
from scripted_service import ScriptedService

from stoker.server.http.connection import BoundedProtocol


def idle_protocol(loop: asyncio.AbstractEventLoop) -> Any:
    protocol = BoundedProtocol.__new__(BoundedProtocol)
    protocol.loop, protocol.transport, protocol.timeout_keep_alive_task = loop, Mock(), None
    protocol.transport.is_closing.return_value = False
    return protocol


@pytest.mark.parametrize("has_request", [False, True])
async def test_a_request_that_has_arrived_prevents_the_close(has_request: bool) -> None:
    loop = asyncio.get_running_loop()
    protocol, ended = idle_protocol(loop), asyncio.Event()
    protocol.transport.close.side_effect = ended.set
    protocol.timeout_keep_alive_handler()
    protocol.transport.close.assert_not_called()
    timer = protocol.timeout_keep_alive_task
    if has_request:
        protocol._unset_keepalive_if_required()  # what `data_received` does first
        assert timer.cancelled() and protocol.timeout_keep_alive_task is None
    else:
        await asyncio.wait_for(ended.wait(), 30)
        protocol.transport.close.assert_called_once()


async def test_idle_connections_that_clients_reset_are_forgotten() -> None:
    """Load balancers end the connections of their health checks so."""

    def num_connections() -> int:
        gc.collect()
        return sum(type(each) is BoundedProtocol for each in gc.get_objects())

    before = num_connections()
    async with live_server(ScriptedService()) as url:
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: stoker\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await until(lambda: num_connections() <= before)
