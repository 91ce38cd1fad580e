"""The tasks that the supervisor sends to its child processes.

This module imports little, because the supervisor starts its children before it imports anything else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.base.nodes import NodeSettings
from stoker.server.settings import ServerSettings


class ExecutorTask(msgspec.Struct):
    """The task of the executor process."""

    engine: str  # directory
    config: RuntimeConfig
    address: str  # ZeroMQ address on which the executor listens for frontends
    nodes: NodeSettings = NodeSettings()


class ExecutorPlace(msgspec.Struct, frozen=True):
    """A running executor, as frontends connect to it: its ZeroMQ address, and the directories of its engine and of its tokenizer."""

    address: str
    tokenizer: str
    engine: str


class ServedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and the settings to serve it with."""

    engine: Path
    tokenizer: Path  # directory
    runtime: RuntimeConfig
    settings: ServerSettings
    nodes: NodeSettings = NodeSettings()


class FrontendTask(msgspec.Struct):
    """The task of one frontend process."""

    model_name: str
    settings: ServerSettings
    socket_fds: list[int]  # HTTP sockets that are listening already
    grpc_address: str | None = None  # host:port; None: no gRPC
    run_dir: str | None = None  # directory of the supervisor's socket; None: there is no supervisor
    executor: ExecutorPlace | None = None  # without a supervisor, which otherwise publishes it
    index: int | None = None  # among several frontends; one that is started again has the index of the one that ended


# Names in the coordination: the ExecutorPlace while there is an executor; why there is none, or why it does not answer; and the number of
# restarts by the name of the process.
EXECUTOR, FAILURE, RESTARTS = "executor", "executor failure", "restarts"
