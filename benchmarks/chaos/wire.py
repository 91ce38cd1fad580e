"""A client for HTTP/1.1 on raw sockets, whose clients may vanish, not read, or send slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from typing import Any, NamedTuple

import httptools

SMALL_BUFFER = 4096  # of the socket of a client that does not read, so that the server's writes block soon
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


class Manners(NamedTuple):
    """How a client behaves. `leave_s`: seconds after which it disconnects."""

    leave_s: float | None = None
    resets: bool = False  # leaves with RST instead of FIN
    pause_s: float = 0.0  # seconds without reading after the request
    trickles: bool = False  # sends the body in parts


POLITE = Manners()


class Response:
    """What a client received. `ended`: complete, cut (closed by the server before the end), left (closed by the client) or late."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended = "cut"
        self.detail = ""
        self.started_s = self.ended_s = time.monotonic()
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self.closes = False

    def feed(self, data: bytes) -> bool:
        """Parse data from the socket. Returns whether the response is complete."""
        self._parser.feed_data(data)
        return self.ended == "complete"

    # Callbacks of the parser.

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.closes = self.closes or (name.lower() == b"connection" and value.lower() == b"close")

    def on_message_complete(self) -> None:
        self.ended = "complete"

    def finish(self) -> Response:
        self.body = b"".join(self._parts)
        self.ended_s = time.monotonic()
        return self


class Connection:
    """A connection of one client, reused for several requests."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._used_s = 0.0  # the end of the last response

    async def post(self, path: str, body: Any, manners: Manners, deadline_s: float) -> Response:
        """Send a request and read its response. Never raises for what the server does."""
        response, reused = Response(), self._socket is not None
        try:
            async with asyncio.timeout(deadline_s):
                if manners.leave_s is None:
                    await self._converse(path, body, manners, response)
                else:
                    try:
                        async with asyncio.timeout(manners.leave_s):
                            await self._converse(path, body, manners, response)
                    except TimeoutError:
                        response.ended = "left"
                        self.close(resets=manners.resets)
        except TimeoutError:
            response.ended = "late"
        except (OSError, httptools.HttpParserError) as error:
            response.detail = repr(error)
        if response.ended != "complete" or response.closes:
            self.close()
        if reused and response.ended == "cut" and not response.status:  # perhaps since the last use, when its process was killed
            response.started_s = self._used_s
        self._used_s = response.finish().ended_s
        return response

    async def _converse(self, path: str, body: Any, manners: Manners, response: Response) -> None:
        loop = asyncio.get_running_loop()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        if self._socket is None:
            self._socket = socket.socket()
            self._socket.setblocking(False)
            if manners.pause_s:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            await loop.sock_connect(self._socket, self._address)
        if manners.trickles:
            await loop.sock_sendall(self._socket, head)
            for at in range(0, len(data), 40):
                await loop.sock_sendall(self._socket, data[at : at + 40])
                await asyncio.sleep(0.01)
        else:
            await loop.sock_sendall(self._socket, head + data)
        if manners.pause_s:
            await asyncio.sleep(manners.pause_s)
        while data := await loop.sock_recv(self._socket, 1 << 16):
            if response.feed(data):
                return
        response.detail = "closed by the server"

    def close(self, *, resets: bool = False) -> None:
        """Close the socket, with RST if `resets`."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                if resets:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._socket.close()
            self._socket = None
