"""The process of `stoker route`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from stoker.base.errors import ConfigError, DependencyError
from stoker.base.logging import get_logger
from stoker.frontend.tokenizer import Tokenizer
from stoker.router.proxy.application import RouterApplication
from stoker.router.proxy.replicas_file import ReplicasFile, read_file
from stoker.router.settings import RouterSettings
from stoker.server.http.tls import check_tls
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.processes.listeners import bind, reserve
from stoker.server.settings import ServerSettings

log = get_logger(__name__)


def serve(settings: RouterSettings, announce: Callable[[str], None] = print) -> int:
    """Route requests until SIGINT or SIGTERM. Returns the exit status 0.

    After the signal no connections are accepted, and requests in flight have drain_timeout_s to end. `announce` is called with a line that
    contains the URL. Raises ConfigError or EngineError for settings that cannot be used, before anything is started.
    """
    server = ServerSettings(
        drain_timeout_s=settings.drain_timeout_s, tls_certificate=settings.tls_certificate, tls_key=settings.tls_key
    )  # fmt: skip
    check_tls(server)
    check_replicas_and_files(settings)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(settings.host, settings.http_port))
        grpc = stack.enter_context(reserve(settings.host, settings.grpc_port)) if settings.grpc_port is not None else None
        port = listener.getsockname()[1]
        own = {f"{scheme}://{host}:{port}" for scheme in ("http", "https") for host in (settings.host, "127.0.0.1", "localhost")}
        if loop := next((url for url in settings.replicas if url in own), None):
            raise ConfigError(f"the replica {loop!r} is the router itself.", cure="Use another --port.")
        uvloop.run(_run(settings, server, listener, grpc, announce))
    return 0


def check_replicas_and_files(settings: RouterSettings) -> None:
    """Raise ConfigError or EngineError if there are no replicas, or the tokenizer or the replicas file cannot be read."""
    if not settings.replicas and settings.replicas_file is None:
        raise ConfigError("no replicas are given.", cure="Name their URLs, or a file with --replicas-file.")
    if settings.tokenizer is not None:
        if not (Path(settings.tokenizer) / "tokenizer.json").is_file():
            cure = "Name an engine, or a folder with a tokenizer.json."
            raise ConfigError(f"tokenizer={settings.tokenizer!r} has no tokenizer.json.", cure=cure)
        Tokenizer.load(settings.tokenizer)
    if settings.replicas_file is not None:
        read_file(settings.replicas_file)


async def _run(
    settings: RouterSettings, server_settings: ServerSettings, listener: socket.socket, grpc: socket.socket | None,
    announce: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until a signal, and stop in order."""
    started = time.monotonic()
    application = RouterApplication(settings)
    await application.open()
    server = HttpServer(http_config(application, server_settings))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    stop_grpc = await _open_grpc(application, grpc) if grpc is not None else None
    watching = None
    if settings.replicas_file is not None:
        file = ReplicasFile(settings.replicas_file, application)
        await file.apply()
        watching = asyncio.create_task(file.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_key else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    announce(f"{len(application.router.fleet)} replicas are routed at {url} (ready after {time.monotonic() - started:.1f} s)")
    await serving
    if watching is not None:
        watching.cancel()
    if stop_grpc is not None:
        await stop_grpc()
    await application.close()


async def _open_grpc(application: RouterApplication, reserved: socket.socket) -> Callable[[], Awaitable[None]]:
    """Start the gRPC server on the reserved port, and return what stops it.

    Raises DependencyError if grpcio or tritonclient is not installed.
    """
    try:
        from stoker.router.proxy.grpc import make_grpc_server
    except ImportError:
        raise DependencyError("grpcio and tritonclient", "the gRPC port", "grpc") from None
    host, port = reserved.getsockname()[:2]
    server, proxy = make_grpc_server(application, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await server.start()
    log.info("Started GRPCInferenceService at %s:%d", host, port)

    async def stop() -> None:
        """Let calls end within drain_timeout_s, and close the connections to the replicas."""
        await server.stop(application.settings.drain_timeout_s)
        await proxy.close()

    return stop
