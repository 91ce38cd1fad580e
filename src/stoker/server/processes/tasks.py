"""What the server's processes are told when they start. Imports little: the parent starts its children before anything else."""

from __future__ import annotations

import msgspec

from stoker.base.config import RuntimeConfig
from stoker.server.settings import ServerSettings


class ExecutorTask(msgspec.Struct):
    engine: str  # directory
    config: RuntimeConfig
    address: str  # where to listen for frontends


class FrontendTask(msgspec.Struct):
    engine: str  # directory, for its tokenizer
    model_name: str
    settings: ServerSettings
    address: str  # of the executor
    socket_fds: list[int]  # listening already
    grpc_address: str | None = None  # host:port; None: no gRPC
