"""Opens the ports of `stoker serve` and prepares its engine. While files are fetched and the engine is built, the ports answer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.base.start_times import StartTimes
from stoker.cli.log_options import use_default_level
from stoker.cli.prepare_server import PreparedServer, local_engine, prepare_server
from stoker.cli.serve_arguments import ServeArguments
from stoker.deploy.deployment import Deployment
from stoker.deploy.model_name import model_name_of
from stoker.deploy.prepare import Progress
from stoker.runtime.weight_prefetch import WeightPrefetch
from stoker.server.processes.executor_control import prestart_executor
from stoker.server.processes.listeners import listen
from stoker.server.processes.prestart import Prestarted
from stoker.server.processes.systemd import ServiceManager
from stoker.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.server.processes.loading import LoadingServer


class ServerStart(NamedTuple):
    """What `server.processes.supervisor.serve` needs."""

    server: PreparedServer
    listeners: list[socket.socket]
    executor: Prestarted | None  # imports torch since the deployment was read, if its engine exists
    times: StartTimes


def prepare(arguments: ServeArguments, progress: Progress) -> ServerStart:
    """The engine and the listening sockets. Until they are returned, the ports answer with status 503 and the progress.

    Raises ConfigError, CheckpointError and EngineError.
    """
    times = StartTimes()
    deployment, listeners = _read(arguments, progress)
    use_default_level(deployment.log_level)
    if (engine := local_engine(deployment)) is not None:
        executor = prestart_executor(engine, deployment.runtime, arguments.nodes)
        WeightPrefetch(engine, arguments.nodes)
        times.reached("executor started")
        try:
            prepared = prepare_server(deployment, progress, arguments.nodes, executor_checks=_executor_checks(deployment.server))
            times.reached("checked")
            return ServerStart(prepared, listeners, executor, times)
        except BaseException:
            executor.close()
            raise
    with _loading_server(listeners, deployment.server, deployment.server.model_name or "model") as loading_server:
        prepared = prepare_server(deployment, _report_to(loading_server, progress), arguments.nodes)
    times.reached("built and checked")
    return ServerStart(prepared, listeners, None, times)


def _executor_checks(settings: ServerSettings) -> bool:
    """Whether an executor starts with the server, and ends it if the engine does not run on this machine."""
    from stoker.server.processes.supervisor import runs_executor

    return settings.exit_on_error and runs_executor(settings)


def _read(arguments: ServeArguments, progress: Progress) -> tuple[Deployment, list[socket.socket]]:
    """The deployment and the listening sockets. For a model that must be fetched, the addresses of the command line answer meanwhile."""
    if not _is_remote(arguments.model):
        deployment = arguments.read_deployment(progress)
        return deployment, listen(deployment.server)
    settings = arguments.settings
    listeners = listen(settings)
    name = settings.model_name or model_name_of(str(arguments.model))
    with _loading_server(listeners, settings, name) as loading_server:
        deployment = arguments.read_deployment(_report_to(loading_server, progress))
    if _addresses(deployment.server) != _addresses(settings):  # an archive with a deployment folder has ports of its own
        for listener in listeners:
            listener.close()
        listeners = listen(deployment.server)
    return deployment, listeners


def _loading_server(listeners: list[socket.socket], settings: ServerSettings, name: str) -> LoadingServer:
    """The server that answers while files are fetched or an engine is built. Its import would delay the start of an existing engine."""
    from stoker.server.processes.loading import LoadingServer

    return LoadingServer(listeners, settings, name)


def _report_to(loading_server: LoadingServer, progress: Progress) -> Progress:
    """A function that reports progress to `progress`, to clients of the loading server, and to systemd."""
    systemd, reported = ServiceManager(), ""

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal reported
        progress(stage, done, total)
        status = loading_server.report_progress(stage, done, total)
        if status != reported:
            systemd.report(f"Preparing the engine: {status}")
            reported = status

    return report


def _is_remote(model: str | None) -> bool:
    """Whether `model` names something to download: a hub id or an address. A misspelt name without a slash does not."""
    return model is not None and "/" in model and not Path(model).expanduser().exists() and not model.startswith((".", "/", "~"))


def _addresses(settings: ServerSettings) -> tuple[object, ...]:
    """The settings that determine which ports are opened, and how."""
    return settings.host, settings.http_port, settings.metrics_port, settings.tls_certificate
