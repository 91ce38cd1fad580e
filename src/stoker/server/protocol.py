"""What a protocol is to a server: routes, and a way to spell failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.server.errors import Failure
from stoker.server.http.request_context import JSON, RequestContext
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.settings import ServerSettings

Handler = Callable[[RequestContext], Awaitable[None]]


class Endpoint(msgspec.Struct, frozen=True):
    """`path` as Starlette writes it: /v2/models/{model}. An open endpoint needs no API key."""

    method: str
    path: str
    handler: Handler
    open: bool = False


class Context(msgspec.Struct, frozen=True):
    """What the protocols of one server share."""

    repository: ModelRepository
    settings: ServerSettings
    metrics: FrontendMetrics
    shared: dict[str, Any] = {}  # what the doors of one protocol share, by its name

    def default_service(self) -> Service:
        """The service of requests that name no model: the first one's. Raises UnavailableError unless it is ready."""
        return self.repository.service(self.repository.first())


class Protocol(ABC):
    """A leaf: translates between its wire and the service, and knows nothing of other protocols."""

    prefixes: tuple[str, ...] = ()  # of paths whose failures are told in this protocol's shape
    failure_type: bytes = JSON  # of failure_body, for what fails outside the protocol's own handlers

    def __init__(self, context: Context) -> None:
        self.context = context

    @abstractmethod
    def endpoints(self) -> list[Endpoint]: ...

    @abstractmethod
    def failure_body(self, failure: Failure) -> bytes:
        """The body of an answer that tells of a failure."""
