"""The response side of an HTTP connection: one request and its response in as few writes as possible.

Private API of uvicorn: RequestResponseCycle with its attributes, HEADER_RE, HEADER_VALUE_RE and STATUS_LINE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from stoker.server.http.library import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

CYCLE = "stoker.cycle"  # key in the scope's extensions
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODYLESS = (204, 304)


class Cycle(RequestResponseCycle):
    """One request and its response. Head and first body bytes are one write if they are sent in the same turn of the event loop."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._head = b""
        self._until_close = False
        self._on_disconnect: Callable[[], object] | None = None

    def whole_body(self) -> bytes | None:
        """The body if all of it has arrived; None if the caller has to receive it."""
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        self.flow.resume_reading()
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return body

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` when the client disconnects before the response is complete; at once if it already has. None removes it."""
        self._on_disconnect = callback
        if self.disconnected:
            self.set_disconnected()

    def set_disconnected(self) -> None:
        """Note that the connection is lost, and call the callback."""
        self.disconnected = True
        self.message_event.set()
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()

    def probe(self) -> bytes:
        """Bytes that can be sent now without an effect on the response: an interim response, or the first digit of the next chunk's size.

        Empty if there are none, as in HTTP/1.0.
        """
        if self.scope["http_version"] != "1.1" or self.response_complete:
            return b""
        if not self.response_started or self._head:
            return CONTINUE
        return b"0" if self.chunked_encoding else b""

    def write(self, chunk: bytes) -> bool:
        """Write a part of a streamed body. False if the client reads too slowly; the caller then has to `send` it and wait."""
        if self.flow.write_paused or not self.response_started:
            return False
        if not self.disconnected:
            self._write_body(chunk, more=True)
        return True

    async def send(self, message: Any) -> None:
        """The `send` of ASGI. Waits while the client reads too slowly; does nothing after a disconnect."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._write_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{message['type']} cannot be sent in this state")

    def _start(self, status: int, headers: Any) -> None:
        """Build the head of the response. It is written with the first body bytes, or alone in the next turn of the event loop."""
        self.response_started, self.waiting_for_100_continue = True, False
        lines, has_close_header = [STATUS_LINE[status]], False
        for name, value in (*self.default_headers, *headers):
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"the header {name!r} cannot be sent")
            name = name.lower()
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive, has_close_header = False, True
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive and not has_close_header:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _BODYLESS:
            # In HTTP/1.0, the end of the connection ends a body of unknown length.
            self.chunked_encoding = self.scope["http_version"] == "1.1"
            self._until_close = not self.chunked_encoding
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
            asyncio.get_running_loop().call_soon(self._write_head)
        self._head = b"".join((*lines, b"\r\n"))

    def _write_head(self) -> None:
        """Write the head that waits for the first body bytes, unless it is already written."""
        head, self._head = self._head, b""
        if head and not self.disconnected:
            self.transport.write(head)

    def _write_body(self, body: bytes, *, more: bool) -> None:
        """Write body bytes, framed as chunks, up to the content length, or until the connection closes."""
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            self._write(head)
        elif self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(b"%b%b%b" % (head, chunk, b"" if more else b"0\r\n\r\n") if head or not more else chunk)
        elif self._until_close:
            self._write(head + body)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("the body's length differs from its Content-Length")
            self._write(head + body)
        if not more:
            self._complete()

    def _write(self, data: bytes) -> None:
        if data:
            self.transport.write(data)

    def _complete(self) -> None:
        """The response is complete: close the connection, or let it read the next request."""
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
