"""One HTTP request and its response on ASGI: reading a bounded body, responding or streaming, and detecting a disconnected client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from stoker.server.errors import BodyError, BodyTimeoutError, BodyTooLargeError, ContentTypeError
from stoker.server.http.cycle import CYCLE, Cycle
from stoker.server.http.json_body import INLINE_BYTES, decode_json
from stoker.server.telemetry.record import RequestRecord, request_id_of
from stoker.server.threads import Result, compute

Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"
PLAIN = b"text/plain"
HTML = b"text/html; charset=utf-8"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAMED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))  # prevents buffering by proxies
BODY_S = 60.0  # limit for the next part of a body
DISCARD_BYTES = 256 << 20  # limits for reading the rest of a body that was refused
DISCARD_S = 2.0
REQUEST_ID = b"x-request-id"


class RequestContext:
    """The request that one handler reads and answers. `path` holds the route's parameters; `request_id` is X-Request-Id, or a new id."""

    def __init__(self, scope: dict[str, Any], receive: Any, send: Any, *, max_body_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self.method: str = scope["method"]
        self.path: dict[str, Any] = {}
        self._cycle: Cycle | None = scope.get("extensions", {}).get(CYCLE)
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id_of(self.headers.get(REQUEST_ID))
        self.request_id_headers: tuple[bytes, ...] = (REQUEST_ID,)  # of the response
        self.record: RequestRecord | None = None  # None for a request of the server itself
        self.limit_headers: Callable[[], list[tuple[bytes, bytes]]] | None = None  # of the response, by the limits of the client's key
        self.status = 0  # of the response; 0 until it has started
        self.disconnected = False
        self._is_large = False  # the body is larger than INLINE_BYTES

    @property
    def started(self) -> bool:
        """Whether the head of the response has been sent."""
        return self.status > 0

    async def body(self, max_bytes: int | None = None) -> bytes:
        """The whole body. `max_bytes` is the limit of this route, if it is lower than max_request_bytes.

        Raises BodyTooLargeError (if Content-Length is too large, before reading) and BodyTimeoutError.
        """
        limit = self._max_body_bytes if max_bytes is None else min(max_bytes, self._max_body_bytes)
        try:
            body = await self._whole_body(limit)
        except _TooLarge as error:
            raise BodyTooLargeError(error.size, limit, of_route=limit < self._max_body_bytes) from None
        self._is_large = len(body) > INLINE_BYTES
        return body

    async def compute(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)`, in a thread if the body is large or compressed."""
        return await compute(function, *args, long=self._is_large or b"content-encoding" in self.headers)

    async def _whole_body(self, limit: int) -> bytes:
        """All bytes of the body. Raises _TooLarge, and the other errors of `body`."""
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            await self._discard()
            raise _TooLarge(int(length))
        if self._cycle is not None and (whole := self._cycle.whole_body()) is not None:
            if len(whole) > limit:
                raise _TooLarge(None)
            return whole
        chunks, size, more = [], 0, True
        while more:
            message = await self._next_part()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            size += len(message.get("body", b""))
            if size > limit:
                await self._discard()
                raise _TooLarge(None)
            chunks.append(message.get("body", b""))
            more = message.get("more_body", False)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _next_part(self) -> Any:
        """The next ASGI message of the body. Raises BodyTimeoutError if none arrives within BODY_S."""
        try:
            async with asyncio.timeout(BODY_S):
                return await self._receive()
        except TimeoutError:
            raise BodyTimeoutError(BODY_S) from None

    async def _discard(self) -> None:
        """Read and drop the rest of a body for at most DISCARD_S. Closing a connection with unread bytes resets it, and the client would
        not receive the response. A client that sent `Expect: 100-continue` is waiting and sends nothing."""
        if b"expect" in self.headers:
            return
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and size < DISCARD_BYTES:
                    message = await self._receive()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)

    @property
    def content_type(self) -> str:
        """The media type of the body in lower case, without parameters; empty if the request has no Content-Type."""
        return self.headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()

    async def json(self, *, long_lists: bool = False, max_bytes: int | None = None) -> dict[str, Any]:
        """The body as a JSON object. Lists of more than MAX_SHORT_NUMBERS numbers require `long_lists`.

        Raises ContentTypeError, BodyError with the reason and the byte offset, and the errors of `body`.
        """
        body = await self.body(max_bytes)
        if self.content_type != "application/json" and not self.content_type.endswith("+json"):
            raise ContentTypeError(self.content_type)
        value = await self.compute(partial(decode_json, long_lists=long_lists), body)
        if not isinstance(value, dict):
            raise BodyError(f"the body is a JSON {_json_name(value)}, not an object.", cure="Send {…}.")
        return value

    async def respond(self, status: int, body: bytes = b"", content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send a whole response."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [(b"content-type", content_type), length, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self, content_type: bytes = EVENT_STREAM, status: int = 200, headers: Headers = STREAMED) -> None:
        """Start a streamed response; `send` its parts, then `close_stream`."""
        await self._start(status, [(b"content-type", content_type), *headers])

    async def send(self, chunk: bytes) -> None:
        """Send the next part of a streamed response. Waits while the client reads too slowly."""
        if self._cycle is None or not self._cycle.write(chunk):
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def close_stream(self) -> None:
        """End a streamed response."""
        await self._send({"type": "http.response.body", "body": b""})

    def cancel_on_disconnect(self) -> CancelOnDisconnect:
        """A context that is cancelled when the client disconnects. It then exits without an exception, with `disconnected` set."""
        return CancelOnDisconnect(self)

    def on_disconnect(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call `callback` when the client disconnects. Returns a function that removes the callback."""
        if self._cycle is not None:
            self._cycle.on_disconnect(callback)
            return lambda: None if self._cycle is None else self._cycle.on_disconnect(None)
        return asyncio.create_task(self._wait_for_disconnect(callback)).cancel

    async def _wait_for_disconnect(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the client has disconnected. Body parts that arrive before are dropped."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        callback()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers, with the request id under the names that the protocol uses, and those of the record."""
        self.status = status
        headers += [(name, self.request_id.encode()) for name in self.request_id_headers]
        if self.record is not None:
            headers += self.record.response_headers()
        if self.limit_headers is not None:
            headers += self.limit_headers()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class _TooLarge(Exception):
    """A body exceeds its limit. `size` is its Content-Length, if that is known."""

    def __init__(self, size: int | None) -> None:
        self.size = size


class CancelOnDisconnect:
    """Cancels the task inside the block when the client disconnects."""

    def __init__(self, http: RequestContext) -> None:
        self._http = http

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._remove_callback = self._http.on_disconnect(self._cancel)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._remove_callback()
        if not isinstance(error, asyncio.CancelledError) or not self._http.disconnected:
            return False
        self._task.uncancel()
        return True

    def _cancel(self) -> None:
        """The client has disconnected: cancel the task, and note why."""
        self._http.disconnected = True
        self._task.cancel()


def _json_name(value: Any) -> str:
    """The JSON type of a decoded value, for error messages."""
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
