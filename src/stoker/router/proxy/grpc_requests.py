"""The requests of a gRPC stream that may be sent to several replicas one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class RepeatableRequests:
    """The requests of a stream. They are read once from the client, and can be sent several times.

    While those in memory exceed `max_bytes`, no further one is read, so that a slow replica slows the client down.
    """

    def __init__(self, requests: AsyncIterator[bytes], max_bytes: int) -> None:
        self._read: list[bytes] = []  # from the first one on, while `is_complete`
        self._num_dropped = 0
        self._size, self._max_bytes = 0, max_bytes
        self._ended = False
        self._turn = 0  # of the latest call
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._fill(requests))

    @property
    def is_complete(self) -> bool:
        """Whether all requests are still in memory."""
        return not self._num_dropped

    async def first(self) -> bytes | None:
        """The first request, or None if the client sends none."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._read or self._ended)
        return self._read[0] if self._read else None

    def again(self) -> AsyncIterator[bytes]:
        """All requests from the first one on, until the client sends no more. Earlier iterators end: their calls have failed."""
        self._turn += 1
        return self._requests(self._turn)

    async def _requests(self, turn: int) -> AsyncIterator[bytes]:
        """The requests for one call."""
        position = 0
        while True:
            async with self._changed:
                while turn == self._turn and not self._ended and self._num_dropped + len(self._read) <= position:
                    await self._changed.wait()
                if turn != self._turn or self._num_dropped + len(self._read) <= position:
                    return
                request = self._read[position - self._num_dropped]
                position += 1
                self._drop_before(position)
                self._changed.notify_all()
            yield request

    def close(self) -> None:
        """Read no more."""
        self._task.cancel()

    def _drop_before(self, position: int) -> None:
        """Forget requests that were sent, if all together are too large to be repeated."""
        while self._size > self._max_bytes and self._num_dropped < position:
            self._size -= len(self._read.pop(0))
            self._num_dropped += 1

    async def _fill(self, requests: AsyncIterator[bytes]) -> None:
        """Read the requests of the client until it sends no more."""
        try:
            async for request in requests:
                async with self._changed:
                    self._read.append(request)
                    self._size += len(request)
                    self._changed.notify_all()
                    await self._changed.wait_for(lambda: self._size <= self._max_bytes)
        finally:
            async with self._changed:
                self._ended = True
                self._changed.notify_all()
