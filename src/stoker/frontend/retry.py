"""Runs a request again when its executor has failed before anything was sent to its client.

The new run has the same id, seed, priority and deadline. A request runs at most MAX_RUNS times, because it may itself be the reason why the
executor fails.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from stoker.base.errors import UnavailableError
from stoker.base.logging import get_logger
from stoker.runtime.client import ExecutorClient
from stoker.runtime.request import TokenRequest

log = get_logger(__name__)

MAX_RUNS = 2
WAIT_S = 600.0  # for the new executor, if the request has no earlier deadline


class Retry:
    """The runs of one request: `task` is that of the present run. Without `enabled` there is only one."""

    def __init__(self, client: ExecutorClient, task: TokenRequest, *, enabled: bool) -> None:
        self.task = task
        self._client = client
        self._num_left = MAX_RUNS - 1 if enabled else 0
        self._started = time.monotonic()
        self._timeout_s = task.timeout_s

    async def wait(self, error: UnavailableError) -> None:
        """Wait for the executor after it has failed with `error`, and set `task` for the next run. Raises `error` if there is none."""
        if not self._num_left or self._client.alive:  # an executor that answers has refused the request
            raise error
        self._num_left -= 1
        try:
            async with asyncio.timeout(self._left_s(WAIT_S)):
                await self._client.recovery()
        except TimeoutError:
            raise error from None
        log.info("request %s runs again, because the executor failed before anything was sent.", self.task.request_id)
        if self._timeout_s is not None:
            self.task = msgspec.structs.replace(self.task, timeout_s=self._left_s(self._timeout_s))

    def _left_s(self, limit_s: float) -> float:
        """The time until the deadline of the request, at most `limit_s`."""
        if self._timeout_s is None:
            return limit_s
        return max(0.0, min(limit_s, self._timeout_s - (time.monotonic() - self._started)))
