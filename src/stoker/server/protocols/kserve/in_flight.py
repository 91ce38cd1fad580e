"""Requests in flight that have an id of the client: no two in one process with the same id, and cancellation by id in all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.server.coordination import Coordination
from stoker.server.protocols.kserve.errors import TritonError

MAX_ID_CHARS = 256
CANCEL = "kserve/cancel"  # signal of the coordination: the id of a request to end


class InFlight:
    """The requests in flight of one process, by id. Requests without an id are not recorded."""

    def __init__(self, coordination: Coordination | None = None) -> None:
        self._coordination = coordination  # None: there is no other process
        self._running: dict[str, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def running(self, request_id: str, cancel: Callable[[], object]) -> Iterator[None]:
        """Record a request while the block runs; `cancel` ends it. Raises TritonError if a request with this id is in flight."""
        if not request_id:
            yield
            return
        if len(request_id) > MAX_ID_CHARS:
            raise TritonError(f"request id has {len(request_id)} characters, and the limit is {MAX_ID_CHARS}")
        if request_id in self._running:
            raise TritonError(
                f"[request id: {request_id}] a request with this id is in flight. Use another id, or wait until it has ended.", 409
            )
        self._running[request_id] = cancel
        try:
            yield
        finally:
            del self._running[request_id]

    async def cancel(self, request_id: str) -> None:
        """End a request; its response contains the tokens generated so far. Does nothing if no request with this id is in flight.

        If this process has no such request, the other frontends look for it.
        """
        if not request_id:
            raise TritonError("stop requires the request_id of the request to end, and this request has none")
        if not self.cancel_here(request_id) and self._coordination is not None and len(request_id) <= MAX_ID_CHARS:
            await self._coordination.signal(CANCEL, request_id)

    def cancel_here(self, request_id: str) -> bool:
        """End a request of this process. Returns whether there is one with this id."""
        if (end := self._running.get(request_id)) is not None:
            end()
        return end is not None
