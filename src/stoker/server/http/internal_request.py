"""Requests to the server's own handlers, without a connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from stoker.server.http.request_context import JSON, STREAMED, Headers, RequestContext


class InternalRequest(RequestContext):
    """A request with `body`. The handler's whole response is `response`; a streamed one is an error."""

    def __init__(self, body: dict[str, Any]) -> None:
        scope = {"method": "POST", "headers": [(b"x-request-id", uuid.uuid4().hex.encode())]}
        super().__init__(scope, None, None, max_body_bytes=0)
        self._body = body
        self.response = b""

    async def json(self, *, long_lists: bool = False, max_bytes: int | None = None) -> dict[str, Any]:
        """The body that was given to the constructor. The arguments have no effect."""
        return self._body

    async def respond(self, status: int, body: bytes = b"", content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Store status and body in this object. The other arguments have no effect."""
        self.status, self.response = status, body

    async def open_stream(self, content_type: bytes = JSON, status: int = 200, headers: Headers = STREAMED) -> None:
        """Raise RuntimeError, because a handler must not stream the response to an internal request."""
        raise RuntimeError("an internal request is not streamed")

    def on_disconnect(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Does nothing, because there is no client that can disconnect."""
        return lambda: None


def receiver(body: bytes) -> Any:
    """The `receive` of ASGI for a request whose whole body is known, and whose client does not disconnect."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        """The body, and after it nothing."""
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    return receive


async def drop(message: Any) -> None:
    """The `send` of ASGI for a response that is not needed."""
