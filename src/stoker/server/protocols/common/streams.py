"""Merging the streams of several requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from stoker.base.types import Delta, GenerationRequest
from stoker.frontend.service import Service

RenameError = Callable[[Exception, int], Exception]


async def merge_streams(
    service: Service, requests: list[GenerationRequest], rename: RenameError = lambda error, index: error
) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """(index of the request, its new deltas), as they arrive. The first error cancels all requests and is raised.

    With several requests, `rename` converts the error of the request with an index to the one that is raised.
    """
    if len(requests) == 1:
        async with aclosing(service.stream(requests[0])) as batches:
            async for deltas in batches:
                yield 0, deltas
        return
    arrived: asyncio.Queue[tuple[int, list[Delta]] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(service, request, index, arrived, rename)) for index, request in enumerate(requests)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    service: Service,
    request: GenerationRequest,
    index: int,
    arrived: asyncio.Queue[tuple[int, list[Delta]] | Exception | None],
    rename: RenameError,
) -> None:
    """Put the deltas of one request into the queue, then None, or the exception that ended it."""
    try:
        async with aclosing(service.stream(request)) as batches:
            async for deltas in batches:
                arrived.put_nowait((index, deltas))
        arrived.put_nowait(None)
    except Exception as error:
        arrived.put_nowait(rename(error, index))
