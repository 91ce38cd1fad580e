"""The Truss door against what the real server said, byte for byte, chunk for chunk."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from live_http import live_app
from scripted_service import make_context
from truss_recordings import Recorded, Reply, StandIn, read, send

from stoker.server.application import make_app
from stoker.server.processes.loading import Waiting
from stoker.server.settings import ServerSettings

# Exchanges in which Stoker does something else; docs/truss.md says what and why, test_truss_predict.py tests it.
OTHERWISE = {
    "HEAD /", "GET /health", "GET /health/ready", "GET /v1/models", "GET /v1/models/model/", "GET /metrics", "GET /metrics/",
    "invalid UTF-8", "HTTP/1.1 without Host", "POST :predict still answers", "content type application/msgpack is read as JSON",
    "websocket upgrade to /v1/websocket on a model without one", "GET /v1/models/", "GET /v1/models/model/ready",
    "POST /v1/models/model/infer", "POST /v1/models/model/predict", "HTTP/1.0 client: no chunked framing",
}  # fmt: skip
SAID = ("content-type", "x-baseten-error-source", "x-baseten-error-code")
HEAD = "POST /v1/models/model:predict HTTP/1.1\r\nHost: h\r\n"
TRUSS = {"protocols": ("truss", "openai")}


@asynccontextmanager
async def truss(service: StandIn, **settings: Any) -> AsyncIterator[int]:
    """The port of a server as a Truss folder makes it."""
    context = await make_context(service, **{**TRUSS, **settings})
    async with live_app(make_app(context), context.settings) as port:
        yield port


def cases(name: str, *, title: str = "", status: int | None = None) -> list[Any]:
    """Those of a file whose title fits the expression, and that were answered with the status."""
    found = [case for case in read(name) if case.title not in OTHERWISE and re.search(title, case.title)]
    return [pytest.param(case, id=case.title) for case in found if status in (None, case.reply.status)]


def same(reply: Reply, case: Recorded) -> None:
    assert (reply.status, reply.pieces) == (case.reply.status, case.reply.pieces)
    assert {name: reply.headers.get(name) for name in SAID} == {name: case.reply.headers.get(name) for name in SAID}
    if "allow" in case.reply.headers:
        assert case.reply.headers["allow"] in reply.headers["allow"].split(", ")


@pytest.mark.parametrize("case", cases("01-*"))
async def test_routes_and_health(case: Recorded) -> None:
    async with truss(StandIn()) as port:
        same(await send(port, case.sent), case)


@pytest.mark.parametrize("case", cases("04-*"))
async def test_bad_requests(case: Recorded) -> None:
    async with truss(StandIn()) as port:
        same(await send(port, case.sent), case)


@pytest.mark.parametrize("case", cases("05-*", status=400))
async def test_damaged_msgpack(case: Recorded) -> None:
    async with truss(StandIn()) as port:
        same(await send(port, case.sent), case)


# {"a": 1} asks nothing of a language model, and "a" is no field of one.
ASKING = {b'{"a": 1}': b'{"prompt": "hi"}', b"\x82\xa6prompt\xa2hi\xa1a\x03": b"\x81\xa6prompt\xa2hi"}


def asking(sent: bytes) -> bytes:
    head, _, body = sent.partition(b"\r\n\r\n")
    asks = ASKING.get(body, body)
    return head.replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % len(asks)) + b"\r\n\r\n" + asks


@pytest.mark.parametrize("case", [*cases("06-*", title="^(?!stream)"), *cases("07-*", title="POST")])
async def test_streams(case: Recorded) -> None:
    """Each text in a chunk of its own; what is no text makes none."""
    async with truss(StandIn()) as port:
        reply = await send(port, asking(case.sent))
    assert b"".join(reply.pieces) == b"".join(case.reply.pieces)
    same(reply, case)


@pytest.mark.parametrize("case", cases("09-*", title="not on this model|^GET|^predict, stream true"))
async def test_a_model_that_reads_stream(case: Recorded) -> None:
    async with truss(StandIn("a", "b", "c")) as port:
        same(await send(port, case.sent), case)


async def test_stream_false_is_an_object_with_text() -> None:
    case = next(case for case in read("09-*") if case.title == "predict, stream absent")
    async with truss(StandIn("a", "b", "c")) as port:
        same(await send(port, asking(case.sent).replace(b"15", b"32").replace(b'"x"}', b'"x", "stream": false}')), case)


@pytest.mark.parametrize("case", cases("10-*"))
async def test_an_executor_that_does_not_answer(case: Recorded) -> None:
    service = StandIn()
    async with truss(service) as port:
        service.is_ready = False
        same(await send(port, case.sent), case)


@pytest.mark.parametrize("case", cases("12-*", title="^loading"))
def test_while_its_engine_is_fetched_and_built(case: Recorded) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Waiting([listener], ServerSettings(**TRUSS), "model"):  # type: ignore[arg-type]
        same(asyncio.run(send(listener.getsockname()[1], case.sent)), case)


@pytest.mark.parametrize("accept", ["", "Accept: application/json\r\n"])
async def test_faults_before_the_first_byte(accept: str) -> None:
    """Streamed or gathered alike; the real server shows the second's Python exception."""
    case = next(case for case in read("08-*") if case.title == "how = value")
    service = StandIn("one")
    service.fault = ValueError("in the model")
    async with truss(service) as port:
        same(await send(port, f'{HEAD}{accept}Content-Length: 16\r\n\r\n{{"prompt": "hi"}}'.encode()), case)


def test_how_many_are_replayed() -> None:
    assert len(read("01-*")) == 24 and len(read("04-*")) == 19 and len(read("12-*")) == 10
