"""`stoker serve --ray`: runs the application on a Ray cluster until a stop signal."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve as ray_serve

from stoker.base import env
from stoker.base.cpus import num_cpus
from stoker.base.errors import ConfigError, DependencyError, UnavailableError, reason_of
from stoker.base.logging import get_logger
from stoker.base.nodes import split_address
from stoker.deploy.devices import visible_gpus
from stoker.ray.deployments import build_application
from stoker.ray.grpc_service import SERVICER
from stoker.ray.haproxy import LOOPBACK, haproxy_variables, unsupported
from stoker.ray.placement import place_replica
from stoker.ray.server_process import free_port
from stoker.ray.settings import NAME, ApplicationSettings
from stoker.server.processes.listeners import address_of, reserve

log = get_logger(__name__)

DEPLOY_FAILED, UNHEALTHY, RUNNING = "DEPLOY_FAILED", "UNHEALTHY", "RUNNING"
_POLL_S = 0.2
CONNECT_TIMEOUT_S = 5.0


class RayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the application runs. Ports are those of Ray Serve's proxies; without `address`, the one for gRPC is the ingress's own."""

    address: str | None = None  # of the cluster; None: RAY_ADDRESS, or a cluster on this machine that ends with the command
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int | None = None
    application: str = NAME


def serve(settings: ApplicationSettings, where: RayAddress, announce: Callable[[str], None]) -> int:
    """Run the application until SIGINT or SIGTERM, and delete it. Returns the exit status.

    Raises ConfigError before anything is started, and UnavailableError with the reason if the application cannot be deployed.
    """
    started = time.monotonic()
    address = where.address or env.text("RAY_ADDRESS") or None
    if address is not None:
        _check_reachable(address)
        return _run(build_application(settings), address, settings, where, announce, started)
    settings = _on_one_host(settings)
    with _grpc_socket(where) as reserved, _http_proxy():
        grpc_address = None if reserved is None else address_of(reserved)
        return _run(build_application(settings, grpc_address), None, settings, where, announce, started, grpc_address)


def _run(
    application: Any, address: str | None, settings: ApplicationSettings, where: RayAddress, announce: Callable[[str], None],
    started: float, grpc_address: str | None = None,
) -> int:  # fmt: skip
    """Run the bound application on the cluster. Returns the exit status. `grpc_address`: that of the ingress's own port."""
    _connect(address, settings)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        has_proxies = address is not None and where.grpc_port is not None
        grpc = {"port": where.grpc_port, "grpc_servicer_functions": [SERVICER]} if has_proxies else None
        ray_serve.start(http_options={"host": where.host, "port": where.http_port}, grpc_options=grpc, proxy_location="EveryNode")
        target = ray_serve.RunTarget(target=application, name=where.application, route_prefix="/")
        ray_serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        try:
            _wait_until_running(where, settings, stopping, has_proxy=address is None)
            if not stopping.is_set():
                names = ", ".join(engine.name for engine in settings.engines)
                seconds = time.monotonic() - started
                also = f", gRPC at {grpc_address}," if grpc_address is not None else ""
                announce(f"{names} is served at http://{where.host}:{where.http_port}{also} by Ray Serve (ready after {seconds:.1f} s)")
                stopping.wait()
        finally:
            ray_serve.delete(where.application)
    finally:
        if address is None:
            ray_serve.shutdown()
        ray.shutdown()
    return 0


@contextlib.contextmanager
def _grpc_socket(where: RayAddress) -> Iterator[socket.socket | None]:
    """A socket that reserves the gRPC port, if there is one, for the ingress.

    Raises ConfigError if the port is in use, and DependencyError without the packages.
    """
    if where.grpc_port is None:
        yield None
        return
    if any(find_spec(name) is None for name in ("grpc", "tritonclient")):
        raise DependencyError("grpcio and tritonclient", "the gRPC port", "grpc")
    with reserve(where.host, where.grpc_port) as reserved:
        yield reserved


@contextlib.contextmanager
def _http_proxy() -> Iterator[None]:
    """Let the cluster that starts inside use HAProxy, if it can."""
    if reason := unsupported():
        log.warning("Ray Serve's own HTTP proxy is used, which adds some milliseconds to a request: %s", reason)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="stoker-", dir="/tmp") as folder:
        metrics, statistics, fallback = (free_port(LOOPBACK) for _ in range(3))
        env.set_ray_variables(haproxy_variables(Path(folder), metrics, statistics, fallback))
        yield


def _on_one_host(settings: ApplicationSettings) -> ApplicationSettings:
    """The settings for a cluster of this machine only. Raises ConfigError for replicas on several hosts."""
    if wrong := next((engine for engine in settings.engines if engine.nodes > 1), None):
        raise ConfigError(
            f"engine {wrong.name}: nodes={wrong.nodes} requires a Ray cluster of as many hosts.", cure="Name one with --ray-address."
        )
    has_gpus = visible_gpus(env.child_environment()) > 0
    engines = tuple(
        msgspec.structs.replace(engine, listen=engine.listen or "127.0.0.1", gpus=engine.gpus if has_gpus else engine.gpus or 0)
        for engine in settings.engines
    )
    return msgspec.structs.replace(settings, engines=engines)


def _check_reachable(address: str) -> None:
    """Raise ConfigError unless the address of a cluster accepts a connection. Ray itself would try for minutes.

    Names such as `auto` and addresses of other schemes than ray:// are left to Ray.
    """
    if ":" not in (place := address.removeprefix("ray://")) or "://" in place:
        return
    if (target := split_address(place)) is None:
        raise ConfigError(f"ray_address={address!r} is refused.", cure="Write HOST:PORT, such as 10.0.0.1:6379, or auto.")
    try:
        socket.create_connection(target, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"ray_address={address} cannot be reached: {reason_of(error)}.", cure="Start a cluster with: ray start --head."
        ) from None


def _connect(address: str | None, settings: ApplicationSettings) -> None:
    """Connect to the cluster, or without an address, start one on this machine that has the CPUs of all replicas."""
    options: dict[str, Any] = {"address": address}
    if address is None:
        replicas = sum(engine.max_replicas * place_replica(engine).bundles[0]["CPU"] for engine in settings.engines)
        needed = math.ceil(replicas + settings.ingress.replicas * settings.ingress.cpus)
        options = {"address": "local", "num_cpus": max(needed, num_cpus()), "include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"ray_address={address}: {str(error).splitlines()[0]}", cure="Start a cluster with: ray start --head.") from None


def _wait_until_running(where: RayAddress, settings: ApplicationSettings, stopping: threading.Event, has_proxy: bool) -> None:
    """Wait until the replicas of the start run, and with `has_proxy`, until the HTTP proxy of this machine sends requests to the ingress.

    Raises UnavailableError with the message of Ray Serve if a replica cannot be started.
    """
    deadline = time.monotonic() + max(engine.start_timeout_s for engine in settings.engines)
    while not stopping.wait(_POLL_S):
        status = ray_serve.status().applications.get(where.application)
        if status is None:
            continue
        if status.status == RUNNING and (not has_proxy or _is_healthy(where)):
            return
        if status.status in (DEPLOY_FAILED, UNHEALTHY) or time.monotonic() > deadline:
            raise UnavailableError(f"Ray Serve did not start the application: {_reason(status)}", cure="Correct the reason.")


def _is_healthy(where: RayAddress) -> bool:
    """Whether the HTTP proxy answers, and has an ingress."""
    connection = http.client.HTTPConnection(LOOPBACK if where.host == "0.0.0.0" else where.host, where.http_port, timeout=2)
    try:
        connection.request("GET", "/-/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _reason(status: Any) -> str:
    """The messages of the deployments that failed."""
    messages = [f"{name}: {each.message}" for name, each in status.deployments.items() if each.message]
    return "; ".join([status.message, *messages]) or str(status.status)
