"""The end of a server: requests on connections that it has accepted are answered, and idle connections are closed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator

import pytest
from live_http import until
from scripted_service import make_context

from stoker.server.application import make_app
from stoker.server.http import connection
from stoker.server.processes.frontend import HttpServer, http_config

REQUEST = b"GET /health/live HTTP/1.1\r\nhost: stoker\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def clients(count: int) -> AsyncIterator[tuple[HttpServer, list[Client]]]:
    """A running server, and `count` connections that it has accepted. The test calls its `shutdown`."""
    context = await make_context()
    server = HttpServer(http_config(make_app(context), context.settings))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup(sockets=[listener])
        connected = [await asyncio.open_connection(*listener.getsockname()) for _ in range(count)]
        await until(lambda: len(server.server_state.connections) == count)
        try:
            yield server, connected
        finally:
            for _, writer in connected:
                writer.close()


async def next_response(reader: asyncio.StreamReader) -> bytes:
    """The head of the next response on a connection that stays open; its body is read, too."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    return head


async def response(client: Client) -> bytes:
    """What the server sends until it closes the connection."""
    return await asyncio.wait_for(client[0].read(), 30)


async def test_requests_that_have_arrived_are_answered() -> None:
    async with clients(4) as (server, connected):
        for reader, writer in connected[:2]:  # connections with an earlier request
            writer.write(REQUEST)
            assert b" 200 " in await next_response(reader)
        for _, writer in connected:
            writer.write(REQUEST)  # the loop sends it at once, and has not read it when the server stops
        await server.shutdown()
        for client in connected:
            answer = await response(client)
            assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [0, 10])
async def test_a_first_request_may_still_arrive(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 600.0)
    async with clients(2) as (server, connected):
        for _, writer in connected:
            writer.write(REQUEST[:sent])
        stopping = asyncio.create_task(server.shutdown())
        await until(lambda: all(protocol._stopping for protocol in server.server_state.connections))
        for _, writer in connected:
            writer.write(REQUEST[sent:])
        for client in connected:
            answer = await response(client)
            assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in answer
        await asyncio.wait_for(stopping, 30)


@pytest.mark.parametrize("sent", [0, 10, len(REQUEST)])
async def test_an_idle_connection_is_closed(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_REQUEST_S", 0.001 if sent < len(REQUEST) else 600.0)
    async with clients(1) as (server, [(reader, writer)]):
        writer.write(REQUEST[:sent])
        if sent == len(REQUEST):
            assert b" 200 " in await next_response(reader)
        await asyncio.wait_for(server.shutdown(), 30)
        assert await response((reader, writer)) == b""
        assert not server.server_state.connections
