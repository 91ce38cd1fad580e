"""The model of a frontend: its service exists while there is an executor, which the supervisor may start, stop and replace."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from stoker.base.errors import UnavailableError
from stoker.base.logging import get_logger
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.server.coordination import Coordination, Values
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredClient, MeteredService
from stoker.server.processes.tasks import EXECUTOR, FAILURE, RESTARTS, ExecutorPlace
from stoker.server.settings import ServerSettings

log = get_logger(__name__)

LOAD_TIMEOUT_S = 86400.0  # without load_timeout_s; the supervisor detects an executor that ended


class EngineService:
    """The repository with the one model `name`, and the executor of the coordination as its engine."""

    def __init__(self, name: str, settings: ServerSettings, metrics: FrontendMetrics, coordination: Coordination) -> None:
        self.repository = ModelRepository()
        self.repository.register(name, self._load, self._close)
        self._name = name
        self._settings = settings
        self._metrics = metrics
        self._place: ExecutorPlace | None = coordination.values.get(EXECUTOR)
        self._metrics.num_restarts = coordination.values.get(RESTARTS, {})
        self._loading: asyncio.Task[None] | None = None
        coordination.on_change(self._apply)

    async def load(self) -> None:
        """Load the service of the present executor, if there is one. Returns when it is ready, or when the executor was withdrawn."""
        if self._place is None:
            return
        self._loading = asyncio.create_task(self.repository.load(self._name))
        try:
            await asyncio.wait({self._loading})
        finally:
            self._loading.cancel()
        if not self._loading.cancelled():
            self._loading.result()

    @property
    def num_active(self) -> int:
        """Number of requests of the service that are running."""
        service = self._generation()
        return service.num_active if service is not None else 0

    def end_requests(self, error: UnavailableError) -> None:
        """End all running requests with `error`, and refuse new ones with it."""
        if (service := self._generation()) is not None:
            service.end_requests(error)

    async def unload(self) -> None:
        """Close the service. Its requests have ended, or have had the time to end."""
        await self.repository.unload(self._name)

    async def _apply(self, changes: Values) -> None:
        """Load the service when `changes` publish an executor. When they withdraw it, unload the service.

        Its requests have drain_timeout_s to end before that. A failure alone is the reason why the service is not ready.
        """
        self._metrics.num_restarts = changes.get(RESTARTS) or self._metrics.num_restarts
        if EXECUTOR not in changes:
            if FAILURE in changes and self._place is not None:
                self.repository.find(self._name).reason = changes[FAILURE] or ""
            return
        self._place = changes[EXECUTOR]
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait({self._loading})
        if self._place is not None:
            await self.repository.load(self._name)
            return
        if (service := self._generation()) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.drain(), self._settings.drain_timeout_s)
        await self.repository.unload(self._name)
        self.repository.find(self._name).reason = changes.get(FAILURE) or "unloaded"

    def _generation(self) -> GenerationService | None:
        """The service of the model, without the wrapper that counts; None while there is no executor."""
        service = self.repository.find(self._name).service
        inner = service.inner if isinstance(service, MeteredService) else None
        return inner if isinstance(inner, GenerationService) else None

    async def _load(self) -> Service:
        """Load the tokenizer while the executor loads the engine, then connect to the executor."""
        place = self._place
        assert place is not None
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(place.tokenizer))
        timeout_s = self._settings.load_timeout_s or LOAD_TIMEOUT_S
        client = await ZmqExecutorClient.connect(place.address, connect_timeout_s=timeout_s)
        metered = MeteredClient(client, self._name, self._metrics)
        service = GenerationService(
            self._name, tokenizer, metered, self._settings.request_limits, retry_unstarted=self._settings.retry_unstarted
        )
        return MeteredService(service, self._metrics)

    async def _close(self, service: Service) -> None:
        """Close a service that is no longer used, with its connection to the executor."""
        assert isinstance(service, MeteredService) and isinstance(service.inner, GenerationService)
        await service.inner.close()
