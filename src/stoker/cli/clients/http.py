"""A small HTTP client for JSON answers and event streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import httptools

from stoker.base import env
from stoker.base.errors import ConfigError, StokerError, UnavailableError

DONE = b"[DONE]"  # OpenAI's marker at the end of a stream
MAX_ERROR_BYTES = 500


class Event(NamedTuple):
    """One server-sent event. `at` is the time.perf_counter() at which its last byte arrived."""

    at: float
    data: bytes


async def get(url: str, path: str) -> bytes:
    """The body of the response to a GET request.

    Raises UnavailableError if no server answers, and StokerError with the body of a response whose status is not 200.
    """
    async with aclosing(_request(url, path, None)) as chunks:
        return b"".join([chunk async for _, chunk in chunks])


async def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON object in the response to a POST request with a JSON body. Raises the same errors as `get`."""
    async with aclosing(_request(url, path, body)) as chunks:
        answer: dict[str, Any] = json.loads(b"".join([chunk async for _, chunk in chunks]))
        return answer


async def events(url: str, path: str, body: dict[str, Any]) -> AsyncGenerator[Event, None]:
    """The events of a streamed POST request, without the final [DONE]. Closing the generator closes the connection.

    Raises the same errors as `get`.
    """
    rest = b""
    async with aclosing(_request(url, path, body)) as chunks:
        async for at, chunk in chunks:
            *complete, rest = (rest + chunk).split(b"\n\n")
            for event in complete:
                data = event.removeprefix(b"data: ")
                if data != DONE:
                    yield Event(at, data)


async def _request(url: str, path: str, body: dict[str, Any] | None) -> AsyncGenerator[tuple[float, bytes], None]:
    """Send one request, and yield (arrival time, bytes) for each chunk of the response's body."""
    address, host, port = _parse_url(url)
    data = b"" if body is None else json.dumps(body).encode()
    method, target = "GET" if body is None else "POST", address.path.rstrip("/") + path
    head = f"{method} {target} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    if (key := env.api_key()) is not None:
        head += f"Authorization: Bearer {key}\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    tls = address.scheme == "https" or None
    try:
        transport, response = await asyncio.get_running_loop().create_connection(_Response, host, port, ssl=tls)
    except OSError as error:
        raise UnavailableError(f"{url} does not answer: {error.strerror or error}.", cure="Start it: stoker serve MODEL.") from None
    try:
        transport.write(head.encode() + b"\r\n" + data)
        async for item in response.body():
            yield item
    finally:
        transport.close()


def _parse_url(url: str) -> tuple[SplitResult, str, int]:
    """(parts, host, port) of a URL. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # unbalanced brackets, or a port that is no number below 65536
        pass
    raise ConfigError(f"url={url!r} is refused.", cure="Use an address such as http://127.0.0.1:8000.")


class _Response(asyncio.Protocol):
    """A connection that receives one response."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()  # None: the end of the body or of the connection
        self._at = 0.0
        self._status = 0
        self._complete = False

    async def body(self) -> AsyncGenerator[tuple[float, bytes], None]:
        """Yield (arrival time, bytes) for each chunk of the body. Raises StokerError for a status other than 200."""
        error = b""
        while (item := await self._chunks.get()) is not None:
            if self._status == 200:
                yield item
            else:
                error += item[1]
        if self._status not in (0, 200):
            raise StokerError(f"the server answered {self._status}: {error[:MAX_ERROR_BYTES].decode(errors='replace')}")
        if not self._complete:
            raise UnavailableError("the server closed the connection before the answer's end.")

    # Callbacks of asyncio.Protocol and httptools.

    def data_received(self, data: bytes) -> None:
        """asyncio's callback: note the time, and parse the data. Malformed data ends the response."""
        self._at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's callback, also used for malformed data: end the body, which then is incomplete."""
        self._chunks.put_nowait(None)

    def on_headers_complete(self) -> None:
        """The parser's callback: note the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """The parser's callback: add a part of the body with its time of arrival."""
        self._chunks.put_nowait((self._at, body))

    def on_message_complete(self) -> None:
        """The parser's callback: the response is complete."""
        self._complete = True
        self._chunks.put_nowait(None)
