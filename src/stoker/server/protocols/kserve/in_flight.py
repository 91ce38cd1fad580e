"""Requests that run under an id of the client's: one at a time under each, and a way to end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.server.protocols.kserve.errors import TritonError

MAX_ID_CHARS = 256


class InFlight:
    """Of one process. A request without an id cannot be named, so it is not kept."""

    def __init__(self) -> None:
        self._running: dict[str, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def running(self, request_id: str, cancel: Callable[[], object]) -> Iterator[None]:
        """While the block runs, `cancel` ends the request. Raises TritonError when the id is taken."""
        if not request_id:
            yield
            return
        if len(request_id) > MAX_ID_CHARS:
            raise TritonError(f"request id has {len(request_id)} characters, and at most {MAX_ID_CHARS} are taken")
        if request_id in self._running:
            raise TritonError(f"[request id: {request_id}] a request with this id is in flight. Use another id, or wait for its end.", 409)
        self._running[request_id] = cancel
        try:
            yield
        finally:
            del self._running[request_id]

    def cancel(self, request_id: str) -> None:
        """End a request, keeping what it has so far. One that has ended already, or never was, is left alone."""
        if not request_id:
            raise TritonError("stop needs the request_id of the request to end; this one has none")
        if (end := self._running.get(request_id)) is not None:
            end()
