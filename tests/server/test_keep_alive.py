"""The end of the keep-alive time: a request that has arrived is read before the connection is closed."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

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
