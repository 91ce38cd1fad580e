"""Executes the requests of a batch with the handlers of their routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

import msgspec

from stoker.base.errors import QueueFullError, UnavailableError
from stoker.server.errors import RateLimitError, describe
from stoker.server.http.internal_request import InternalRequest
from stoker.server.http.request_context import RequestContext
from stoker.server.protocols.openai.batches.lines import BatchLine, LineResult, failed_result, response_result

Handlers = Mapping[str, Callable[[RequestContext], Awaitable[None]]]  # url → handler

MAX_CONCURRENT = 256
BATCH_PRIORITY = 1  # lower values are served first; requests of clients have 0
RETRY_S = 1.0  # while the queue is full or the model is not available
MAX_LIMITED_S = 60.0  # between two attempts while the limit per minute of a key is reached
POLL_S = 0.5
UNAVAILABLE_S = 60.0  # a model that is not available for longer fails the request


def num_concurrent(max_batch_size: int) -> int:
    """Requests of a batch in flight: enough that the engine always has waiting ones."""
    return min(MAX_CONCURRENT, 2 * max_batch_size)


async def execute_line(line: BatchLine, handlers: Handlers) -> LineResult:
    """The result of one request. Waits while the queue is full or the model is not available."""
    deadline = time.monotonic() + UNAVAILABLE_S
    while True:
        body = dict(line.body)
        body.setdefault("priority", BATCH_PRIORITY)
        http = InternalRequest(body)
        try:
            await handlers[line.url](http)
        except QueueFullError:
            await asyncio.sleep(RETRY_S)
        except RateLimitError as error:
            if error.code != RateLimitError.code:  # a quota of a day or a month
                return failed_result(line, describe(error), http.request_id)
            await asyncio.sleep(min(error.retry_after_s, MAX_LIMITED_S))
        except Exception as error:
            if isinstance(error, UnavailableError) and time.monotonic() < deadline:
                await asyncio.sleep(RETRY_S)
                continue
            return failed_result(line, describe(error), http.request_id)
        else:
            return response_result(line, http.status, http.request_id, msgspec.Raw(http.response))


async def execute_lines(
    lines: Sequence[BatchLine], handlers: Handlers, *, concurrent: int, ends_early: Callable[[], bool] = lambda: False
) -> AsyncGenerator[LineResult, None]:
    """The results as they arrive, with at most `concurrent` requests in flight.

    Ends when all lines have a result, or when `ends_early`, which is called every POLL_S at least, returns True. The end, or closing the
    generator, cancels the requests in flight.
    """
    waiting = iter(lines)
    running: set[asyncio.Task[LineResult]] = set()
    try:
        while not ends_early():
            while len(running) < concurrent and (line := next(waiting, None)) is not None:
                running.add(asyncio.create_task(execute_line(line, handlers)))
            if not running:
                return
            done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
