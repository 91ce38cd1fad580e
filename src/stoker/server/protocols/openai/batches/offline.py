"""Runs the requests of a batch on a service of this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.protocol import Context
from stoker.server.protocols.openai.batches.execution import execute_lines, num_concurrent
from stoker.server.protocols.openai.batches.lines import BatchLine, LineResult
from stoker.server.protocols.openai.protocol import OpenAI
from stoker.server.settings import ServerSettings


async def run_offline(
    service: Service, settings: ServerSettings, lines: Sequence[BatchLine], on_result: Callable[[LineResult], None]
) -> None:
    """Execute `lines` and call `on_result` with each result as it arrives. Raises ConfigError for a setting that is not valid."""
    repository = ModelRepository()

    async def load() -> Service:
        """The service of the caller."""
        return service

    async def unload(_: Service) -> None:
        """Does nothing: the caller closes the service."""

    name = settings.model_name or service.model_name
    repository.register(name, load, unload)
    await repository.load(name)
    context = Context(repository, settings, FrontendMetrics())
    concurrent = num_concurrent(service.info.limits.max_batch_size)
    with context.cleanup:
        async with aclosing(execute_lines(lines, OpenAI(context).handlers(), concurrent=concurrent)) as results:
            async for result in results:
                on_result(result)
