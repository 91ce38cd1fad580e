"""Replicas in this process, on real sockets, that can die in the middle of a response; and a router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
from live_http import LiveServer, live_app
from scripted_service import ScriptedService, make_context

from stoker.router.proxy.application import RouterApplication
from stoker.router.settings import RouterSettings
from stoker.server.application import make_app
from stoker.server.processes.frontend import http_config
from stoker.server.processes.listeners import reserve
from stoker.server.protocols.kserve.grpc.server import make_grpc_server
from stoker.server.settings import ServerSettings


class StubReplica:
    """A server of a scripted service. `kill` closes its port and all connections, as the end of its process would."""

    def __init__(self, service: ScriptedService, **settings: Any) -> None:
        self.service = service
        self._settings = settings
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        with reserve("127.0.0.1", 0) as reserved:  # gRPC shares its port with this socket
            grpc_port = reserved.getsockname()[1]
            context = await make_context(self.service, **{"grpc_port": grpc_port, **self._settings})
            self._grpc = make_grpc_server(context, f"127.0.0.1:{grpc_port}")
            await self._grpc.start()
        self._server = LiveServer(http_config(make_app(context), context.settings))
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.002)

    async def kill(self) -> None:
        if self._task.done():
            return
        await self._grpc.stop(0)
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for task in list(self._server.server_state.tasks):
            task.cancel()
        self._server.stop()
        await self._task

    async def restart(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        await self.start()


@contextlib.asynccontextmanager
async def replicas(*services: ScriptedService, **settings: Any) -> AsyncIterator[list[StubReplica]]:
    stubs = [StubReplica(service, **settings) for service in services]
    for stub in stubs:
        await stub.start()
    try:
        yield stubs
    finally:
        for stub in stubs:
            await stub.kill()


@contextlib.asynccontextmanager
async def routed(stubs: list[StubReplica], **settings: Any) -> AsyncIterator[tuple[RouterApplication, httpx.AsyncClient]]:
    """A router for these replicas, on a real socket, and a client of it."""
    router = RouterApplication(RouterSettings(replicas=tuple(stub.url for stub in stubs), **{"health_interval_s": 0.05, **settings}))
    await router.open()
    try:
        async with live_app(router, ServerSettings()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield router, client
    finally:
        await router.close()
