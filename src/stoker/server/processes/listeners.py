"""The sockets of a server: opened before anything is loaded, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from stoker.base.errors import ConfigError
from stoker.server.http.tls import check_tls
from stoker.server.settings import ServerSettings
from stoker.server.telemetry.tracing import check_packages

BACKLOG = 2048


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Listening HTTP sockets: http_port, then metrics_port if set. Raises ConfigError if a port or the certificate cannot be used.

    grpc_port is checked, too, because it is opened only after the engine of a checkpoint was built.
    """
    check_tls(settings)
    if settings.otlp_endpoint is not None:
        check_packages()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(bind(settings.host, settings.http_port))]
        if settings.metrics_port is not None:
            listeners.append(stack.enter_context(bind(settings.host, settings.metrics_port, option="--metrics-port")))
        if settings.grpc_port is not None:
            reserve(settings.host, settings.grpc_port).close()
        stack.pop_all()
        return listeners


def with_metrics_port(settings: ServerSettings, listeners: list[socket.socket]) -> ServerSettings:
    """The settings with the actual metrics port, also if metrics_port is 0. The application compares it with the port of each request."""
    if settings.metrics_port is None:
        return settings
    return msgspec.structs.replace(settings, metrics_port=listeners[1].getsockname()[1])


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that never listens. It reserves the gRPC port for the frontends, which all listen on it. Raises ConfigError.

    The port is first bound without SO_REUSEPORT, which fails if another server of the same user listens on it with SO_REUSEPORT.
    """
    with bind(host, port, option="--grpc-port") as probe:
        family, address = probe.family, probe.getsockname()
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(address)
    return reserved


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A listening socket. Raises ConfigError, so that a port in use is reported before anything is loaded.

    `option` is the command-line option of the port, which the error message names.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"host={host!r} cannot be used: {error.strerror}.", cure="Use an address of this machine, such as 127.0.0.1."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"{host}:{port} cannot be used: {error.strerror}."
        raise ConfigError(message, cure=f"Stop the other server, or use another {option}.") from None
    listener.setblocking(False)
    return listener


def address_of(bound: socket.socket) -> str:
    """HOST:PORT of a bound socket; an IPv6 address is in brackets."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
