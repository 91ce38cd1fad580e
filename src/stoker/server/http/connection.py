"""uvicorn's fastest HTTP parser, with a bound on what comes before a body and answers that leave in as few writes as can be.

Applications speak ASGI. Those that know this server find its `Cycle` in the scope, and spare a token two coroutines and a request a task.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10  # request line and headers, or trailers; the parser itself would keep on collecting
MAX_PIPELINED = 256  # requests that wait on one connection for the answers of earlier ones
HEAD_S = 75.0  # a new connection, and one that has begun a request, has so long to complete the head
CYCLE = "stoker.cycle"  # its place among the scope's extensions
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_BODYLESS = (204, 304)


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers exceed MAX_HEAD_BYTES, take longer than HEAD_S, or come too many at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._unseen = False  # the parser is given a head that no client sent
        self._idle_bytes = 0  # received since the present message brought anything of its body
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: Cycle | None = None  # the request that is being answered; `cycle` may be a later one

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._idle_bytes > MAX_HEAD_BYTES:
            self._end(_TOO_LARGE)
        elif self._in_head and self._head_timer is None:
            self._await_head()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                self._decline_upgrade()
                data = data[upgrade.args[0] :]

    def _decline_upgrade(self) -> None:
        """The parser takes a request that would change the protocol, as Java's clients send them (h2c), for one without a body. A
        second head, that nobody sees, has it read the body all the same."""
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0].lower() in (b"content-length", b"transfer-encoding")]
        if framing:
            self.cycle.more_body = True
            self._unseen = True
            self.parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))
            self._unseen = False

    def on_message_begin(self) -> None:
        if not self._unseen:
            self._in_head = True
            super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are left out
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self._unseen:
            return
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._complete_scope()
        before = self.cycle
        cycle = Cycle(
            scope=self.scope, transport=self.transport, flow=self.flow, logger=self.logger, access_logger=self.access_logger,
            access_log=False, default_headers=self.server_state.default_headers, message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue, on_response=self.on_response_complete,
            keep_alive=self.scope["http_version"] != "1.0" and self.parser.should_keep_alive(),
        )  # fmt: skip
        self.cycle = cycle
        self.scope["extensions"] = {CYCLE: cycle}  # type: ignore[dict-item]  # ASGI has objects of servers' own there, too
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:  # pipelined
            if len(self.pipeline) >= MAX_PIPELINED:
                raise RuntimeError(f"more than {MAX_PIPELINED} requests wait")  # ends the parser, and the connection with 400
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.left()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._answered is not None and not self._answered.response_complete:
            self._await_head()  # its client may be busy with that answer
        else:
            self._end(_TOO_SLOW if self._in_head else b"")

    def _end(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            if answer:
                self.transport.write(answer)
            self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _complete_scope(self) -> None:
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope |= {
            "method": self.parser.get_method().decode("ascii"), "http_version": self.parser.get_http_version(), "raw_path": url.path,
            "path": urllib.parse.unquote(path) if "%" in path else path, "query_string": url.query or b"",
        }  # fmt: skip


class Cycle(RequestResponseCycle):
    """A request and its answer. The head of an answer waits for the body's first bytes, within one turn of the event loop."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._head = b""
        self._until_close = False
        self._on_leave: Callable[[], object] | None = None

    def whole_body(self) -> bytes | None:
        """The body, if all of it is there; otherwise it is to be received."""
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        self.flow.resume_reading()
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return body

    def on_leave(self, call: Callable[[], object] | None) -> None:
        """`call` when the client leaves before the answer is complete; at once when it has left."""
        self._on_leave = call
        if self.disconnected:
            self.left()

    def left(self) -> None:
        """The connection is lost."""
        self.disconnected = True
        self.message_event.set()
        call, self._on_leave = self._on_leave, None
        if call is not None:
            call()

    def write(self, chunk: bytes) -> bool:
        """A piece of a chunked body; False when the client reads too slowly, and it has to be sent the usual way."""
        if self.flow.write_paused or not self.response_started:
            return False
        if not self.disconnected:
            self._write_body(chunk, more=True)
        return True

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._write_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{message['type']} is not to be sent now")

    def _start(self, status: int, headers: Any) -> None:
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
            self.chunked_encoding = self.scope["http_version"] == "1.1"  # before, a body of unknown length ends with its connection
            self._until_close = not self.chunked_encoding
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
            asyncio.get_running_loop().call_soon(self._write_head)
        self._head = b"".join((*lines, b"\r\n"))

    def _write_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected:
            self.transport.write(head)

    def _write_body(self, body: bytes, *, more: bool) -> None:
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
                raise RuntimeError("the body is not as long as its Content-Length")
            self._write(head + body)
        if not more:
            self._complete()

    def _write(self, data: bytes) -> None:
        if data:
            self.transport.write(data)

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
