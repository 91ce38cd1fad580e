"""A frontend process: parses HTTP and gRPC, tokenizes and streams. It never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from stoker.base.errors import DependencyError, StokerError
from stoker.base.logging import get_logger
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.server.application import make_app
from stoker.server.http.connection import BoundedProtocol
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredClient, MeteredService
from stoker.server.processes.child import end_with_parent, receive_task
from stoker.server.processes.coordinator import FrontendCoordination
from stoker.server.processes.tasks import FrontendTask
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

log = get_logger(__name__)

LOAD_TIMEOUT_S = 86400.0  # without load_timeout_s; the supervisor detects an executor that ended
KEEP_ALIVE_S = 75  # longer than the 60 s after which load balancers close idle connections, so that none reuses a closed one
STOP_POLL_S = 0.1


class HttpServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers; `serve` does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
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
    metrics = FrontendMetrics()
    repository = ModelRepository()
    repository.register(task.model_name, lambda: load_service(task, metrics), unload_service)
    coordination = await FrontendCoordination.connect(task.run_dir)
    context = Context(repository, task.settings, metrics, coordination)
    server = HttpServer(http_config(make_app(context), task.settings))
    grpc = await open_grpc(context, task.grpc_address) if task.grpc_address is not None else None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
    end_with_parent()
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=fd) for fd in task.socket_fds]))
    loading = asyncio.create_task(repository.load(task.model_name))
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        if (error := loading.exception()) is not None:
            raise error
        report_ready()
    await asyncio.gather(serving, *([end_grpc(server, grpc, task.settings)] if grpc is not None else []))
    loading.cancel()
    await repository.unload(task.model_name)
    context.cleanup.close()
    await coordination.close()
    metrics.counter_buffer.write()


async def open_grpc(context: Context, address: str) -> Any:
    """Start a gRPC server at `address`. Raises DependencyError if grpcio or tritonclient is not installed."""
    try:
        from stoker.server.protocols.kserve.grpc.server import make_grpc_server
    except ImportError:
        raise DependencyError("grpcio and tritonclient", "the gRPC port", "grpc") from None
    server = make_grpc_server(context, address)
    await server.start()
    return server


async def end_grpc(http: HttpServer, grpc: Any, settings: ServerSettings) -> None:
    """Stop the gRPC server when the HTTP server stops. Requests in flight have drain_timeout_s to end."""
    while not http.should_exit:
        await asyncio.sleep(STOP_POLL_S)
    await grpc.stop(settings.drain_timeout_s)


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
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        backlog=2048,
    )


async def load_service(task: FrontendTask, metrics: FrontendMetrics) -> Service:
    """Load the tokenizer while the executor loads the engine, then connect to the executor."""
    tokenizer = await asyncio.to_thread(Tokenizer.load, Path(task.engine))
    client = await ZmqExecutorClient.connect(task.address, connect_timeout_s=task.settings.load_timeout_s or LOAD_TIMEOUT_S)
    metered = MeteredClient(client, task.model_name, metrics)
    service = GenerationService(task.model_name, tokenizer, metered, task.settings.request_limits)
    return MeteredService(service, metrics)


async def unload_service(service: Service) -> None:
    assert isinstance(service, MeteredService) and isinstance(service.inner, GenerationService)
    await service.inner.close()
