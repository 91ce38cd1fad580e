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
    server = HttpServer(http_config(app, settings))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
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
