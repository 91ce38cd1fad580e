"""The end of a frontend: requests in flight have drain_timeout_s to end, and are then answered with an error.

First, the generation service ends its requests with UnavailableError, which every protocol writes in its own format: status 503, or an
error event in a stream that has started. Requests that do not wait for the service are cancelled END_S later, by uvicorn and by gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn

from stoker.base.errors import UnavailableError
from stoker.base.logging import get_logger
from stoker.server.processes.engine_service import EngineService

log = get_logger(__name__)

END_S = 2.0  # after the drain time: for writing the errors, and for clients that read them
STOP_POLL_S = 0.1


async def drain(
    http: uvicorn.Server, servers: list[asyncio.Task[Any]], model: EngineService, timeout_s: float, stop: Callable[[], None]
) -> None:
    """Wait until the HTTP server stops. If requests are running `timeout_s` seconds later, end them with an error.

    Returns when all `servers` have ended. `stop` ends background work, which the next server continues, and which therefore must not fail.
    """
    while not http.should_exit:
        await asyncio.sleep(STOP_POLL_S)
    _, unfinished = await asyncio.wait(servers, timeout=timeout_s)
    stop()
    if unfinished:
        _end_requests(http, model, timeout_s)
    await asyncio.gather(*servers)


def _end_requests(http: uvicorn.Server, model: EngineService, timeout_s: float) -> None:
    """End all running requests with an error, because the drain time is over."""
    num_http, num_generating = len(http.server_state.tasks), model.num_active
    if num_http or num_generating:
        text = "drain_timeout_s=%g is over; %d HTTP requests and %d running generations end with status 503 or an error event."
        log.warning(text, timeout_s, num_http, num_generating)
    model.end_requests(
        UnavailableError(f"The server is stopping, and the request was still running after {timeout_s:g} s.", cure="Send it again.")
    )


async def end_grpc(http: uvicorn.Server, grpc: Any, timeout_s: float) -> None:
    """Stop the gRPC server when the HTTP server stops. Calls in flight are cancelled END_S after `timeout_s` seconds."""
    while not http.should_exit:
        await asyncio.sleep(STOP_POLL_S)
    await grpc.stop(timeout_s + END_S)
