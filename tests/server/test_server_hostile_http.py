"""Hostile connections: each is refused or closed with bounded memory, and the next client receives a response."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from live_http import live_server, until
from scripted_service import ScriptedService

from stoker.base.types import Delta, GenerationRequest
from stoker.server.http import connection as http_protocol
from stoker.server.http import request_context
from stoker.server.http.cycle import CONTINUE

HEALTH = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 3}'
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


class HeldService(ScriptedService):
    """Answers with one token, and with the others when `rest` is set."""

    def __init__(self, answer: str) -> None:
        super().__init__(answer)
        self.rest = asyncio.Event()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        async with contextlib.aclosing(super().stream(request)) as batches:
            yield await anext(batches)
            await self.rest.wait()
            async for deltas in batches:
                yield deltas


@contextlib.asynccontextmanager
async def connected(**settings: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server. Afterwards, the server must still respond to another connection."""
    async with live_server(ScriptedService(), **settings) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()
        assert b" 200 " in await _once(port, HEALTH)


async def _once(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
    writer.close()
    return answer


async def _flood(writer: asyncio.StreamWriter, data: bytes, times: int) -> int:
    """Send `data` repeatedly until the server closes the connection. Returns how often it was sent."""
    with contextlib.suppress(ConnectionError):
        for sent in range(times):
            writer.write(data)
            await writer.drain()
            if writer.transport.is_closing():
                return sent
            await asyncio.sleep(0)
        return times
    return 0


async def test_requests_that_arrive_byte_by_byte() -> None:
    async with connected() as (reader, writer):
        for request in (COMPLETION, CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)):
            for at in range(len(request)):
                writer.write(request[at : at + 1])
                await asyncio.sleep(0)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b" 200 " in head and b'"text":"Hel"' in await reader.readexactly(length)


@pytest.mark.parametrize("data", [b"a: b\r\n" * 1000, b"x-" + b"a" * 5000], ids=["lines", "one line"])
async def test_trailers_that_are_too_long_end_the_connection(data: bytes) -> None:
    async with connected() as (_, writer):
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        assert await _flood(writer, data, 4000) < 4000


async def test_trailers_are_not_headers() -> None:
    async with connected(api_keys=("secret-key-1",)) as (reader, writer):
        writer.write(CHUNKED + b"%x\r\n%b\r\n0\r\nauthorization: Bearer secret-key-1\r\n\r\n" % (len(BODY), BODY))
        assert b" 401 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected() as (reader, writer):
        writer.write((HEALTH + COMPLETION) * 50)
        for _ in range(100):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert b" 200 " in head
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def test_too_many_pipelined_requests_end_the_connection() -> None:
    async with connected() as (_, writer):
        assert await _flood(writer, COMPLETION * 200, 4000) < 4000


async def test_an_incomplete_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.4)  # the head arrives sooner, also on a busy machine
    async with connected() as (reader, writer):
        writer.write(HEALTH[:10])
        assert b" 408 " in await asyncio.wait_for(reader.read(), 10)


async def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.05)
    async with connected() as (reader, _):
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_an_incomplete_second_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.4)
    async with connected() as (reader, writer):
        writer.write(HEALTH + HEALTH[:10])
        assert (await asyncio.wait_for(reader.read(), 10)).count(b" 408 ") == 1


async def test_the_timeout_of_a_second_head_waits_for_the_first_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.4)
    service = ScriptedService()
    service.hold = asyncio.Event()
    async with live_server(service) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(COMPLETION + HEALTH[:10])
        await until(lambda: service.num_streaming)
        await asyncio.sleep(0.5)
        service.hold.set()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.index(b" 200 ") < answer.index(b'"text":"Hel"') < answer.index(b" 408 ")


async def test_an_incomplete_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_context, "BODY_S", 0.05)
    async with connected() as (reader, writer):
        writer.write(CHUNKED + b"1\r\n{\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert b" 408 " in answer and b"request_timeout" in answer


@pytest.mark.parametrize("framing", [COMPLETION, CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [1, 50, 1 << 20])
async def test_upgrades_are_declined_and_bodies_are_read(framing: bytes, size: int) -> None:
    """Java's HttpClient sends these headers to every http address. The response says that the connection ends."""
    upgrade = b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n"
    request = framing.replace(b"host: x\r\n", upgrade)
    async with connected() as (reader, writer):
        for at in range(0, len(request), size):
            writer.write(request[at : at + size])
            await asyncio.sleep(0)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b" 200 " in head and b"\r\nconnection: close\r\n" in head.lower()
        assert b'"text":"Hel"' in await asyncio.wait_for(reader.read(), 10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions stream", "pipelined", "HTTP/1.0"])
async def test_a_client_that_only_stops_sending_gets_its_answer(path: str) -> None:
    service = ScriptedService()
    service.hold = asyncio.Event()
    body = BODY.replace(b"}", b', "stream": true}') if path.endswith("stream") else BODY
    request = COMPLETION.replace(BODY, body).replace(b"content-length: %d" % len(BODY), b"content-length: %d" % len(body))
    request = request.replace(b"HTTP/1.1", b"HTTP/1.0") if path == "HTTP/1.0" else request
    async with live_server(service) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(request + (HEALTH if path == "pipelined" else b""))
        writer.write_eof()
        await until(lambda: service.num_streaming == 1)
        if path != "HTTP/1.0":
            assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10) == CONTINUE
        service.hold.set()
        answer = await asyncio.wait_for(reader.read(), 10)  # up to the end of the connection
        writer.close()
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")) and b'"text":"' in answer
    assert answer.count(b" 200 OK") == (2 if path == "pipelined" else 1) and service.left == []


@pytest.mark.parametrize("disconnects", [False, True])
async def test_a_client_that_stops_sending_during_a_stream(disconnects: bool) -> None:
    """The probe is a leading zero of the next chunk's size, which changes nothing for a client that reads on."""
    service = HeldService("Hello")
    async with live_server(service) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = BODY.replace(b"}", b', "stream": true}')
        writer.write(COMPLETION.replace(BODY, body).replace(b"content-length: %d" % len(BODY), b"content-length: %d" % len(body)))
        await asyncio.wait_for(reader.readuntil(b'"H"'), 10)
        if disconnects:
            writer.close()
            await until(lambda: len(service.left) == 1)
            return
        writer.write_eof()
        await asyncio.wait_for(reader.readuntil(b"\r\n0"), 10)
        service.rest.set()
        assert re.match(rb"[0-9a-f]+\r\ndata: ", rest := await asyncio.wait_for(reader.read(), 10))
        assert b"[DONE]" in rest and rest.endswith(b"\r\n0\r\n\r\n") and service.left == []
        writer.close()


@pytest.mark.parametrize("sent", [b"", HEALTH[:20], COMPLETION[:-5], CHUNKED + b"5\r\n{"])
async def test_a_request_that_cannot_become_complete_is_closed(sent: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""


@pytest.mark.parametrize("request_, status", [
    (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", b"40"),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"40"),
    (b"FOO / HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
    (b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", b"405"),
    (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", b"40"),
    (b"GET /v2/models/..%2f..%2fetc%2fpasswd/config HTTP/1.1\r\nhost: x\r\n\r\n", b"404"),
    (b"GET /v2/models/%00%ff/config HTTP/1.1\r\nhost: x\r\n\r\n", b"40"),
    (b"GET /v1/models/%0d%0aset-cookie:%20a=b HTTP/1.1\r\nhost: x\r\n\r\n", b"404"),
    (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}", b"400"),
    (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", b"400"),
    (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n{}", b"400"),
    (b"POST /v1/completions HTTP/1.1\r\ncontent-length: " + b"9" * 400 + b"\r\n\r\n{}", b"400"),
    (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"4"),
    (b"GET /" + b"a" * 70_000, b"431"),
    (b"GET /health/live HTTP/1.1\r\n\r\n", b"400"),
    (b"GET /health/live HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n", b"400"),
    (b"GET /health/live HTTP/1.0\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
    (b"GET /health/live HTTP/1.0\r\n\r\n", b"200"),
    (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n", b"501"),
    (CHUNKED.replace(b"chunked", b"unknown, chunked") + b"0\r\n\r\n", b"501"),
])  # fmt: skip
async def test_invalid_requests(request_: bytes, status: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(request_)
        line = await asyncio.wait_for(reader.readline(), 10)
        assert line.startswith(b"HTTP/1.1 " + status), line


async def test_the_response_to_head_has_no_body() -> None:
    async with connected() as (reader, writer):
        writer.write(HEALTH.replace(b"GET", b"HEAD") + HEALTH.replace(b"/live", b"/ready").replace(b"GET", b"HEAD") + HEALTH)
        for _ in range(3):
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).startswith(b"HTTP/1.1 200")


async def test_streams_of_http_1_0_have_no_chunks() -> None:
    body = b'{"prompt": "hi", "max_tokens": 3, "stream": true}'
    async with connected() as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: keep-alive\r\n\r\n"
            % len(body)
            + body
        )
        head, _, rest = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("disconnects", [True, False])
async def test_a_client_that_does_not_read_pauses_its_stream(disconnects: bool) -> None:
    """The server reads no more deltas than its buffers hold. Then the client disconnects, or continues to read and receives everything."""
    service = ScriptedService("x" * 20_000, max_output_len=20_000)
    num_read = 0

    async def counted(request: Any) -> Any:
        nonlocal num_read
        async for deltas in stream(request):
            num_read += 1
            yield deltas

    stream, service.stream = service.stream, counted  # type: ignore[method-assign]
    body = b'{"prompt": "hi", "max_tokens": 20000, "stream": true, "logprobs": 3}'
    async with live_server(service) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1 << 12)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
            + body
        )
        await until(lambda: num_read)
        before = 0
        while before < num_read:
            before = num_read
            await asyncio.sleep(0.2)
        assert 0 < num_read < 20_000 and service.num_streaming == 1
        if disconnects:
            writer.close()
            await until(lambda: service.num_streaming == 0)
            assert len(service.left) == 1
        else:
            assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"0\r\n\r\n") and num_read == 20_000
