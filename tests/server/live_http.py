"""Servers for tests, in-process ASGI or on a real loopback socket, and a reader of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
from scripted_service import make_asgi, make_context

from stoker.server.application import make_app
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.settings import ServerSettings


class LiveServer(HttpServer):
    """Stops as soon as its connections and tasks have ended, and after 0.1 s at the latest.

    Uvicorn looks every 0.1 s whether it is to stop, and then sleeps for 0.1 s. `test_server_stop.py` tests its way to stop.
    """

    _ticks: asyncio.Future[None] | None = None

    async def main_loop(self) -> None:
        self._ticks = asyncio.ensure_future(super().main_loop())
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticks

    def stop(self) -> None:
        """Make `serve` return soon, without waiting for the next look of uvicorn and for requests that take longer than 0.1 s."""
        self.should_exit = self.force_exit = True
        if self._ticks is not None:
            self._ticks.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self.servers:
            acceptor.close()
            await acceptor.wait_closed()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def asgi_client(*services: Any, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = await make_asgi(*services, **settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://stoker") as client:
        yield client


@contextlib.asynccontextmanager
async def live_server(*services: Any, **settings: Any) -> AsyncIterator[str]:
    """The URL of a real server in this event loop, on a free loopback port."""
    context = await make_context(*services, **settings)
    async with live_app(make_app(context), context.settings) as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def live_app(app: Any, settings: ServerSettings) -> AsyncIterator[int]:
    """The port of an application on a real socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = LiveServer(http_config(app, settings))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await task


async def until(condition: Any) -> None:
    """Wait until other tasks have made the condition true."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def events(text: str) -> list[Any]:
    """The JSON of each server-sent event; "[DONE]", the end of OpenAI's streams, is unchanged."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]
