"""Asking a running server: whole answers and event streams, with arrival times. Many at once cost little, so a benchmark stays honest."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import httptools

from stoker.base.errors import ConfigError, StokerError, UnavailableError

DONE = b"[DONE]"


class Event(NamedTuple):
    """One server-sent event; `at` is time.perf_counter() when its last byte came."""

    at: float
    data: bytes


async def get(url: str, path: str) -> bytes:
    """The body of a GET. Raises UnavailableError or StokerError with the server's words."""
    async with aclosing(_exchange(url, path, None)) as pieces:
        return b"".join([piece async for _, piece in pieces])


async def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a JSON POST. Raises as `get` does."""
    async with aclosing(_exchange(url, path, body)) as pieces:
        return json.loads(b"".join([piece async for _, piece in pieces]))


async def events(url: str, path: str, body: dict[str, Any]) -> AsyncGenerator[Event, None]:
    """The events of a streamed POST, without the closing [DONE]. Leaving early closes the connection. Raises as `get` does."""
    rest = b""
    async with aclosing(_exchange(url, path, body)) as pieces:
        async for at, piece in pieces:
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                data = event.removeprefix(b"data: ")
                if data != DONE:
                    yield Event(at, data)


async def _exchange(url: str, path: str, body: dict[str, Any] | None) -> AsyncGenerator[tuple[float, bytes], None]:
    """Send one request and yield its body as it comes. Raises StokerError for a status that is not 200."""
    to, host, port = _place(url)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {to.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {to.netloc}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    try:
        transport, response = await asyncio.get_running_loop().create_connection(_Response, host, port, ssl=to.scheme == "https" or None)
    except OSError as error:
        raise UnavailableError(f"{url} does not answer: {error.strerror or error}.", cure="Start it: stoker serve ENGINE.") from None
    try:
        transport.write(head.encode() + b"\r\n" + data)
        async for item in response.body():
            yield item
    finally:
        transport.close()


def _place(url: str) -> tuple[SplitResult, str, int]:
    """The address's parts, its host and its port. Raises ConfigError."""
    try:
        to = urlsplit(url)
        if to.scheme in ("http", "https") and to.hostname:
            return to, to.hostname, to.port or (443 if to.scheme == "https" else 80)
    except ValueError:  # brackets, or a port, that cannot be
        pass
    raise ConfigError(f"url={url!r} is refused.", cure="Use an address such as http://127.0.0.1:8000.")


class _Response(asyncio.Protocol):
    """A connection that reads one response."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._arrived: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        self._at = 0.0
        self._status = 0
        self._complete = False

    async def body(self) -> AsyncGenerator[tuple[float, bytes], None]:
        told = b""
        while (item := await self._arrived.get()) is not None:
            if self._status == 200:
                yield item
            else:
                told += item[1]
        if self._status not in (0, 200):
            raise StokerError(f"the server answered {self._status}: {told[:500].decode(errors='replace')}")
        if not self._complete:
            raise UnavailableError("the server closed the connection before the answer's end.")

    # asyncio's and httptools' callbacks.

    def data_received(self, data: bytes) -> None:
        self._at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived.put_nowait(None)

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._arrived.put_nowait((self._at, body))

    def on_message_complete(self) -> None:
        self._complete = True
        self._arrived.put_nowait(None)
