"""A frontend process: parses HTTP and gRPC, tokenizes and streams. It never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from stoker.base.errors import DependencyError, StokerError
from stoker.base.logging import get_logger
from stoker.base.metrics import EXHAUSTED
from stoker.base.process import freeze_objects
from stoker.server.application import make_app
from stoker.server.coordination import Coordination, Coordinator
from stoker.server.http.accepting import Acceptor
from stoker.server.http.connection import READ_S, BoundedProtocol
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.processes.child import receive_task
from stoker.server.processes.coordinator import FrontendCoordination
from stoker.server.processes.draining import END_S, drain, end_grpc
from stoker.server.processes.engine_service import EngineService
from stoker.server.processes.tasks import EXECUTOR, FrontendTask
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings
from stoker.server.telemetry.log_control import follow_log
from stoker.server.telemetry.summary import LoadLog

log = get_logger(__name__)

KEEP_ALIVE_S = 75  # longer than the 60 s after which load balancers close idle connections, so that none reuses a closed one


class HttpServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers; `serve` does. Connections wait while the process has no free descriptors.

    `on_exhausted` is called when no connection could be accepted.
    """

    def __init__(self, config: uvicorn.Config, on_exhausted: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_exhausted = on_exhausted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's servers, which close connections that wait when there are no free descriptors."""
        await super().startup(sockets=[])

        def create() -> asyncio.Protocol:
            """The protocol of a new connection, as uvicorn creates it."""
            protocol: Any = self.config.http_protocol_class
            created: asyncio.Protocol = protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            return created

        accepting: Any = [Acceptor(listener, create, self.config.ssl, self._on_exhausted) for listener in sockets or []]
        self.servers = accepting  # uvicorn closes them before it waits for the requests in flight

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's method, which resets accepted connections whose requests have arrived but were not read."""
        for acceptor in self.servers:
            acceptor.close()
            await acceptor.wait_closed()
        if self.server_state.connections and not self.force_exit:
            await asyncio.sleep(READ_S)
            await asyncio.sleep(0)  # libuv runs timers before it reads sockets: after a suspension, the requests are read now
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's method and leaves the signal handlers as they are."""
        yield


def main() -> int:
    """Run a frontend for the task that the supervisor sends. Returns the exit status."""
    task, report_ready = receive_task()
    try:
        uvloop.run(serve(task, report_ready))
    except StokerError as error:
        log.error("%s", error)
        return 1
    return 0


async def serve(task: FrontendTask, report_ready: Callable[[], Any]) -> None:
    """Serve until SIGTERM and the end of the requests in flight.

    The server accepts requests while the model loads and refuses them with status 503. Raises the error of a failed load.
    """
    metrics, coordination = FrontendMetrics(task.index), await connect_coordination(task)
    follow_log(coordination)
    model = EngineService(task.model_name, task.settings, metrics, coordination)
    context = Context(model.repository, task.settings, metrics, coordination)
    server = HttpServer(http_config(make_app(context), task.settings), lambda: metrics.of(EXHAUSTED, "http").inc())
    grpc = await open_grpc(context, task.grpc_address) if task.grpc_address is not None else None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=fd) for fd in task.socket_fds]))
    loading = asyncio.create_task(model.load())
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        if (error := loading.exception()) is not None:
            raise error
        freeze_objects()
        report_ready()
    load_log = LoadLog(model.repository, None if task.run_dir is None else Path(task.run_dir))
    stops = [start() for start in (*context.background, load_log.start)] if loading.done() else []

    def stop_background() -> None:
        """End the work that runs beside requests."""
        for stop in stops:
            stop()

    timeout_s = task.settings.drain_timeout_s
    servers = [serving, *([asyncio.create_task(end_grpc(server, grpc, timeout_s))] if grpc is not None else [])]
    await drain(server, servers, model, timeout_s, stop_background)
    loading.cancel()
    await model.unload()
    context.cleanup.close()
    await coordination.close()
    metrics.counter_buffer.write()


async def connect_coordination(task: FrontendTask) -> Coordination:
    """The coordination with the other frontends; without a supervisor, that of this process alone."""
    if task.run_dir is not None:
        return await FrontendCoordination.connect(task.run_dir)
    coordination = Coordinator()
    if task.executor is not None:
        await coordination.put(EXECUTOR, task.executor)
    return coordination


async def open_grpc(context: Context, address: str) -> Any:
    """Start a gRPC server at `address`. Raises DependencyError if grpcio or tritonclient is not installed."""
    try:
        from stoker.server.protocols.kserve.grpc.server import make_grpc_server
    except ImportError:
        raise DependencyError("grpcio and tritonclient", "the gRPC port", "grpc") from None
    server = make_grpc_server(context, address)
    await server.start()
    return server


def http_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """The configuration of uvicorn with the HTTP parser `BoundedProtocol`, which is derived from a private class of uvicorn."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + END_S),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        backlog=2048,
    )
