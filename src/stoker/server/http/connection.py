"""An HTTP/1.1 connection: uvicorn's httptools parser with limits on request heads, and responses in as few writes as possible.

The application is an ASGI application. `RequestContext` additionally uses the `Cycle` object that this module puts into the scope's
extensions. That saves two coroutines per streamed token and one task per request compared with ASGI messages.

Private API of uvicorn: HttpToolsProtocol with its attributes and the methods that `BoundedProtocol` overrides or calls.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import Any

import httptools

from stoker.server.http.cycle import CYCLE, Cycle
from stoker.server.http.half_close import HalfClosed
from stoker.server.http.library import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # request line and headers, or trailers; the parser itself has no limit
MAX_PIPELINED = 256  # pipelined requests of one connection
READ_S = 0.05  # before idle connections are closed, for requests that have arrived but were not read
FIRST_REQUEST_S = 0.5  # at the end of the server, for connections that have not sent a request yet
HEAD_S = 75.0  # limit for a complete head, from the connection or from the first byte of the request
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_BAD_HOST = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_UNKNOWN_CODING = b"HTTP/1.1 501 Not Implemented\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request head exceeds MAX_HEAD_BYTES or HEAD_S, or that pipelines more than MAX_PIPELINED requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._in_repeated_head = False  # the parser reads the head that `_decline_upgrade` repeats
        self._idle_bytes = 0  # received since the last part of the present message's body
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal = b""  # the response to a head that HTTP does not allow
        self._half_closed: HalfClosed | None = None  # the client sends nothing more
        self._answered: Cycle | None = None  # the request being answered; `cycle` may be a later, pipelined one
        self._stopping = False  # the server ends, and the response to the next request closes the connection

    def connection_made(self, transport: Any) -> None:
        """asyncio's callback: the client has connected."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """asyncio's callback: parse the data, and close the connection if it exceeds a limit."""
        self._unset_keepalive_if_required()
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if self._refusal:
                self._close(self._refusal)
                return
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._idle_bytes > MAX_HEAD_BYTES:
            self._close(_TOO_LARGE)
        elif self._in_head and self._head_timer is None:
            self._start_head_timer()

    def _feed(self, data: bytes) -> None:
        """Give all data to the parser, in parts where the parser stops."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                self._decline_upgrade()
                data = data[upgrade.args[0] :]

    def _decline_upgrade(self) -> None:
        """Read the body of a request with an `Upgrade` header, such as Java's clients send (h2c), as HTTP/1.1.

        The response closes the connection, so that the client does not wait for another protocol on it. The parser assumes that such a
        request has no body. A repeated head with the same framing headers, which is not reported to the
        application, makes it read the body.
        """
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0].lower() in (b"content-length", b"transfer-encoding")]
        if framing:
            self.cycle.more_body = True
            self._in_repeated_head = True
            self.parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
            self._in_repeated_head = False

    def on_message_begin(self) -> None:
        """The parser's callback at the start of a request."""
        if not self._in_repeated_head:
            self._in_head = True
            super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's callback for a header."""
        if self._in_head:  # trailers are ignored
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """The parser's callback for a part of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Called by the parser. Starts the request, or queues it if an earlier one of the connection is not answered yet."""
        if self._in_repeated_head:
            return
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._check_head()
        self._complete_scope()
        before = self.cycle
        cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            on_response=self.on_response_complete,
            keep_alive=self._keeps_alive(),
        )
        self.cycle = cycle
        self.scope["extensions"] = {CYCLE: cycle}  # type: ignore[dict-item]  # ASGI allows a server's own objects there
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:  # pipelined
            if len(self.pipeline) >= MAX_PIPELINED:
                # The parser ends, and `data_received` closes the connection with status 400.
                raise RuntimeError(f"more than {MAX_PIPELINED} pipelined requests")
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _keeps_alive(self) -> bool:
        """Whether the connection stays open after the response to the request whose head is complete."""
        if self._stopping or self.scope["http_version"] == "1.0":
            return False
        return bool(self.parser.should_keep_alive()) and not self.parser.should_upgrade()

    def _check_head(self) -> None:
        """Refuse a head without exactly one Host (RFC 9112, 3.2), or with a transfer coding other than chunked (6.1).

        Raises RuntimeError, at which the parser ends, and `data_received` sends the refusal and closes the connection.
        """
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._refusal = _UNKNOWN_CODING
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refusal = _BAD_HOST
        if self._refusal:
            raise RuntimeError("the head of the request is refused")

    def on_message_complete(self) -> None:
        """The parser's callback at the end of a request."""
        self._idle_bytes = 0
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio uses the result, uvicorn returns None
        """asyncio's callback: the client sends nothing more. Requests that have arrived are answered before the connection closes.

        Returns whether the connection stays open.
        """
        answered = self._answered
        if answered is None or answered.response_complete or self.cycle.more_body or self.scope["scheme"] == "https":
            return False  # nothing to answer, or a request that cannot become complete; TLS has no half-closed connections
        self._half_closed = HalfClosed(self.loop, self.transport, self._probe)
        return True

    def _probe(self) -> bytes:
        """Bytes that do not change the response in progress."""
        return b"" if self._answered is None else self._answered.probe()

    def on_response_complete(self) -> None:
        """The callback of a cycle: its response is complete. Starts the next request, or closes a half-closed connection after the last."""
        super().on_response_complete()
        if self._half_closed is not None and self._answered is not None and self._answered.response_complete:
            self._close(b"")

    def timeout_keep_alive_handler(self) -> None:
        """uvicorn's callback at the end of the keep-alive time. Closes the connection later, unless a request is read before.

        libuv runs timers before it reads sockets: after this process was suspended, an idle connection would be closed although a request
        has arrived on it, which the client could not tell from a lost request.
        """
        self.timeout_keep_alive_task = self.loop.call_later(READ_S, super().timeout_keep_alive_handler)

    def shutdown(self) -> None:
        """uvicorn's callback at the end of the server. Closes the connection after its response, or at once if it is idle.

        A connection without a request so far, or with an incomplete head, has FIRST_REQUEST_S: its client is about to send the request,
        and would see a reset instead of a response.
        """
        if (self._answered is None or self._in_head) and not self._stopping:
            self.loop.call_later(FIRST_REQUEST_S, self.shutdown)
        else:
            super().shutdown()
        self._stopping = True

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's callback: the connection has ended. The request in progress sees a disconnected client."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn's timer, which would keep 8 KiB for 75 s after a reset
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.set_disconnected()

    def _start_head_timer(self) -> None:
        """The next request head must be complete within HEAD_S."""
        self._head_timer = self.loop.call_later(HEAD_S, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        """Close the connection, with status 408 if a head has started. While a response is sent, start the timer again."""
        if self._answered is not None and not self._answered.response_complete:
            self._start_head_timer()  # the client may be reading that response
        else:
            self._close(_TOO_SLOW if self._in_head else b"")

    def _close(self, response: bytes) -> None:
        """Close the connection after `response`, which may be empty."""
        if not self.transport.is_closing():
            if response:
                self.transport.write(response)
            self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """uvicorn's hook: a request begins. Notes its cycle, to know whether a response is in progress."""
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _complete_scope(self) -> None:
        """Set method, path and query of the ASGI scope from the parsed head."""
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope |= {
            "method": self.parser.get_method().decode("ascii"),
            "http_version": self.parser.get_http_version(),
            "raw_path": url.path,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "query_string": url.query or b"",
        }
