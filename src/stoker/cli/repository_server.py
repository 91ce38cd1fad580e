"""Serves a Triton repository in the foreground: the common part of `stoker launch` and `stoker tritonserver`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.base.nodes import NodeSettings
from stoker.cli.api_keys import collect_keys, read_admin_key
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.settings import ServerSettings

if TYPE_CHECKING:
    from stoker.cli.prepare_server import PreparedServer
    from stoker.deploy.deployment import Deployment

_PR_SET_NAME = 15  # of prctl(2)


def read_repository(repository: Path) -> Deployment:
    """The deployment of a model repository. Raises ConfigError for a folder of another format."""
    from stoker.cli.prepare_server import read_deployment

    deployment = read_deployment(repository, ServerSettings(), RuntimeConfig())
    if not isinstance(deployment.server.options, TritonOptions | None):
        raise ConfigError(f"{repository} is of the format {deployment.format}.", cure=f"Serve it: stoker serve {repository}.")
    return deployment


def prepare_repository(repository: Path, nodes: NodeSettings = NodeSettings()) -> tuple[PreparedServer, TritonOptions]:
    """The server of a model repository, and its options. Raises ConfigError for a folder of another format."""
    from stoker.cli.prepare_server import prepare_server

    prepared = prepare_server(read_repository(repository), nodes=nodes)
    assert isinstance(prepared.settings.options, TritonOptions)
    return prepared, prepared.settings.options


def check_world_size(name: str, requested: int | None, prepared: PreparedServer) -> None:
    """Raise ConfigError if `requested` ranks are not the engine's number of ranks. None: any number. `name` is the option in messages."""
    from stoker.cli.prepare_server import engine_info

    num_ranks = engine_info(prepared.engine).mapping.world_size
    if requested not in (None, num_ranks):
        raise ConfigError(
            f"{name} {requested}: the engine has {num_ranks} rank{'s' if num_ranks > 1 else ''}.",
            cure=f"Use {num_ranks}, or build another engine.",
        )


def serve_repository(
    repository: Path,
    prepared: PreparedServer,
    announce: Callable[[str], None],
    complete: Callable[[PreparedServer], ServerSettings],
    nodes: NodeSettings = NodeSettings(),
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status. `complete` applies the command line's options to the settings.

    The process is named tritonserver: scripts search for it with pgrep. When a client loads a model, `repository` is read again. Clients
    must send the API key in STOKER_API_KEY, if it is set.
    """
    from stoker.server.processes.supervisor import serve
    from stoker.server.processes.tasks import ServedEngine

    def read_again() -> ServedEngine:
        """Read the repository again, for a client that loads a model."""
        again, _ = prepare_repository(repository)
        tokenizer = again.tokenizer or again.engine
        return ServedEngine(engine=again.engine, tokenizer=tokenizer, runtime=again.runtime, settings=complete(again))

    settings = msgspec.structs.replace(complete(prepared), api_keys=collect_keys([]), admin_key=read_admin_key(None))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"tritonserver", 0, 0, 0)
    return serve(prepared.engine, prepared.runtime, settings, announce, tokenizer=prepared.tokenizer, read_again=read_again, nodes=nodes)


def with_options(settings: ServerSettings, **changes: object) -> ServerSettings:
    """A copy of `settings`, in whose TritonOptions the fields `changes` are replaced."""
    assert isinstance(settings.options, TritonOptions)
    return msgspec.structs.replace(settings, options=msgspec.structs.replace(settings.options, **changes))


def check_no_tritonserver() -> None:
    """Raise ConfigError when a tritonserver process exists, as launch_triton_server.py does: it would still hold GPU memory."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = path.read_text().strip()
        except OSError:  # the process has ended
            continue
        if name == "tritonserver":
            raise ConfigError(f"tritonserver is already running as process {path.parent.name}.", cure="Stop it, or launch with --force.")
