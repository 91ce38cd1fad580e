"""The last known statistics of executors. Reading them takes a bounded time, also while an executor does not answer."""

from __future__ import annotations

import asyncio
import time

import msgspec

from stoker.base.logging import get_logger
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.runtime.request import ExecutorStats

log = get_logger(__name__)

ANSWER_S = 0.5  # time for an executor to answer, which it does between two steps


class KnownStatistics(msgspec.Struct, frozen=True):
    """Statistics, and the age in seconds of the answer that contained them."""

    stats: ExecutorStats
    age_s: float


class ExecutorStatistics:
    """The statistics of each model. At most one query of a model is in flight; an executor that is late answers a later reading, too."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[ExecutorStats, float]] = {}  # with the monotonic time of their arrival
        self._queries: dict[str, asyncio.Task[None]] = {}

    async def read(self, repository: ModelRepository, answer_s: float | None = None) -> dict[str, KnownStatistics]:
        """The last statistics of each model with a service, by model name; without models that have never answered.

        Waits at most `answer_s` (None: ANSWER_S) for new ones.
        """
        services = {model.name: model.service for model in repository.models() if model.service is not None}
        self._answers = {name: answer for name, answer in self._answers.items() if name in services}
        new = [self._query(name, service) for name, service in services.items() if name not in self._queries and service.ready]
        if new:
            await asyncio.wait(new, timeout=ANSWER_S if answer_s is None else answer_s)
        now = time.monotonic()
        return {name: KnownStatistics(stats, now - arrival) for name, (stats, arrival) in self._answers.items()}

    def _query(self, name: str, service: Service) -> asyncio.Task[None]:
        """Start a query of one model."""
        task = self._queries[name] = asyncio.create_task(self._update(name, service))
        return task

    async def _update(self, name: str, service: Service) -> None:
        """Store the answer of an executor. The service limits the time; a failure is logged, and the last answer remains."""
        try:
            self._answers[name] = (await service.stats(), time.monotonic())
        except Exception as error:
            log.warning("no statistics of %s: %s", name, error)
        finally:
            del self._queries[name]
