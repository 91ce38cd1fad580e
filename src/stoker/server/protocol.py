"""The interface of protocols: the endpoints of a protocol and its format of errors."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from stoker.base.fields.json_schema import Schema
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.server.coordination import Coordination, Coordinator
from stoker.server.errors import Failure
from stoker.server.http.request_context import JSON, RequestContext
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.operation import OBJECT, Operation
from stoker.server.settings import ServerSettings
from stoker.server.state_directory import StateDirectory
from stoker.server.telemetry.telemetry import Telemetry

Handler = Callable[[RequestContext], Awaitable[None]]


class Endpoint(msgspec.Struct, frozen=True):
    """One route. `path` has Starlette's syntax: /v2/models/{model}. An open endpoint needs no API key."""

    method: str
    path: str
    handler: Handler
    open: bool = False


# Starts work that runs beside requests, and returns the function that stops it.
StartWork = Callable[[], Callable[[], None]]


class Context(msgspec.Struct, frozen=True):
    """The objects that all protocols of one server share."""

    repository: ModelRepository
    settings: ServerSettings
    metrics: FrontendMetrics
    coordination: Coordination = msgspec.field(default_factory=Coordinator)
    cleanup: contextlib.ExitStack = msgspec.field(default_factory=contextlib.ExitStack)  # closed when the server has stopped
    background: list[StartWork] = []  # each is called once when the model is loaded
    shared: dict[str, Any] = {}  # objects that protocols or their transports share, by name

    def telemetry(self) -> Telemetry:
        """The log and the traces of the requests of this process."""
        if "telemetry" not in self.shared:
            self.shared["telemetry"] = Telemetry(self.settings)
            self.cleanup.callback(self.shared["telemetry"].shut_down)
        telemetry: Telemetry = self.shared["telemetry"]
        return telemetry

    def default_service(self) -> Service:
        """The service of requests that name no model, which is the first model's. Raises UnavailableError if it is not ready."""
        return self.repository.service(self.repository.first())

    def state_directory(self) -> StateDirectory:
        """The directory for stored responses, files and batches. The first call opens it. Raises ConfigError."""
        if "state" not in self.shared:
            self.shared["state"] = StateDirectory(self.settings.state_dir)
        state: StateDirectory = self.shared["state"]
        return state


class Protocol(ABC):
    """Translates between one API and the generation service. A protocol does not depend on other protocols."""

    prefixes: tuple[str, ...] = ()  # of paths whose errors have this protocol's format
    failure_type: bytes = JSON  # content type of failure_body
    operations: Mapping[tuple[str, str], Operation] = {}  # (method, path) of each endpoint → its description in /openapi.json
    error_schema: Schema = OBJECT  # JSON schema of failure_body

    def __init__(self, context: Context) -> None:
        self.context = context

    @abstractmethod
    def endpoints(self) -> list[Endpoint]:
        """The routes of this protocol."""

    @abstractmethod
    def failure_body(self, failure: Failure) -> bytes:
        """The body of an error response."""
