"""The tasks that the supervisor sends to its child processes.

This module imports little, because the supervisor starts its children before it imports anything else.
"""

from __future__ import annotations

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.server.settings import ServerSettings


class ExecutorTask(msgspec.Struct):
    """The task of the executor process."""

    engine: str  # directory
    config: RuntimeConfig
    address: str  # ZeroMQ address on which the executor listens for frontends


class FrontendTask(msgspec.Struct):
    """The task of one frontend process."""

    engine: str  # directory that contains the tokenizer
    model_name: str
    settings: ServerSettings
    address: str  # ZeroMQ address of the executor
    socket_fds: list[int]  # HTTP sockets that are listening already
    run_dir: str  # directory of the supervisor's socket
    grpc_address: str | None = None  # host:port; None: no gRPC
