"""Responses of the Truss protocol equal the recorded responses of the real server, byte for byte and chunk for chunk."""

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
from truss_recordings import Recorded, RecordedResponse, TokenTextService, read_recordings, send

from stoker.deploy.truss.load import PROTOCOLS
from stoker.server.application import make_app
from stoker.server.processes.loading import LoadingServer
from stoker.server.settings import ServerSettings

pytestmark = pytest.mark.compatibility(
    protocol="Truss", client="truss, recorded", version="0.18.35", feature="responses of the model server, byte for byte"
)

# Exchanges in which Stoker deviates from the real server. docs/truss.md documents the response, and test_truss_predict.py tests it.
DEVIATIONS = {
    "HEAD /", "GET /health", "GET /health/ready", "GET /v1/models", "GET /v1/models/model/", "GET /metrics", "GET /metrics/",
    "invalid UTF-8", "HTTP/1.1 without Host", "POST :predict still answers", "content type application/msgpack is read as JSON",
    "websocket upgrade to /v1/websocket on a model without one", "GET /v1/models/", "GET /v1/models/model/ready",
    "POST /v1/models/model/infer", "POST /v1/models/model/predict", "HTTP/1.0 client: no chunked framing",
}  # fmt: skip
COMPARED_HEADERS = ("content-type", "x-baseten-error-source", "x-baseten-error-code")
HEAD = "POST /v1/models/model:predict HTTP/1.1\r\nHost: h\r\n"
TRUSS = {"protocols": PROTOCOLS}


@asynccontextmanager
async def truss(service: TokenTextService, **settings: Any) -> AsyncIterator[int]:
    """The port of a server with the protocols of a Truss folder."""
    context = await make_context(service, **{**TRUSS, **settings})
    async with live_app(make_app(context), context.settings) as port:
        yield port


def cases(name: str, *, title: str = "", status: int | None = None) -> list[Any]:
    """The exchanges of a file whose title matches the expression and whose response has the status."""
    found = [case for case in read_recordings(name) if case.title not in DEVIATIONS and re.search(title, case.title)]
    return [pytest.param(case, id=case.title) for case in found if status in (None, case.response.status)]


def assert_same(response: RecordedResponse, case: Recorded) -> None:
    assert (response.status, response.chunks) == (case.response.status, case.response.chunks)
    assert {name: response.headers.get(name) for name in COMPARED_HEADERS} == {
        name: case.response.headers.get(name) for name in COMPARED_HEADERS
    }
    if "allow" in case.response.headers:
        assert case.response.headers["allow"] in response.headers["allow"].split(", ")


@pytest.mark.parametrize("case", cases("01-*"))
async def test_routes_and_health(case: Recorded) -> None:
    async with truss(TokenTextService()) as port:
        assert_same(await send(port, case.request), case)


@pytest.mark.parametrize("case", cases("04-*"))
async def test_bad_requests(case: Recorded) -> None:
    async with truss(TokenTextService()) as port:
        assert_same(await send(port, case.request), case)


@pytest.mark.parametrize("case", cases("05-*", status=400))
async def test_damaged_msgpack(case: Recorded) -> None:
    async with truss(TokenTextService()) as port:
        assert_same(await send(port, case.request), case)


# The recorded model accepts any body. A language model needs a prompt, and has no field `a`.
PROMPTS = {b'{"a": 1}': b'{"prompt": "hi"}', b"\x82\xa6prompt\xa2hi\xa1a\x03": b"\x81\xa6prompt\xa2hi"}


def with_prompt(request: bytes) -> bytes:
    """The request with a body that has a prompt."""
    head, _, body = request.partition(b"\r\n\r\n")
    new_body = PROMPTS.get(body, body)
    return head.replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % len(new_body)) + b"\r\n\r\n" + new_body


@pytest.mark.parametrize("case", [*cases("06-*", title="^(?!stream)"), *cases("07-*", title="POST")])
async def test_streams(case: Recorded) -> None:
    """Each text is one chunk. A token without text has no chunk."""
    async with truss(TokenTextService()) as port:
        response = await send(port, with_prompt(case.request))
    assert b"".join(response.chunks) == b"".join(case.response.chunks)
    assert_same(response, case)


@pytest.mark.parametrize("case", cases("09-*", title="embeddings: not on this model|^GET|^predict, stream true"))
async def test_a_model_that_reads_stream(case: Recorded) -> None:
    async with truss(TokenTextService("a", "b", "c")) as port:
        assert_same(await send(port, case.request), case)


async def test_stream_false_is_an_object_with_text() -> None:
    case = next(case for case in read_recordings("09-*") if case.title == "predict, stream absent")
    async with truss(TokenTextService("a", "b", "c")) as port:
        assert_same(await send(port, with_prompt(case.request).replace(b"15", b"32").replace(b'"x"}', b'"x", "stream": false}')), case)


@pytest.mark.parametrize("case", cases("10-*"))
async def test_an_executor_that_does_not_answer(case: Recorded) -> None:
    service = TokenTextService()
    async with truss(service) as port:
        service.is_ready = False
        assert_same(await send(port, case.request), case)


@pytest.mark.parametrize("case", cases("12-*", title="^loading"))
def test_while_its_engine_is_fetched_and_built(case: Recorded) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, LoadingServer([listener], ServerSettings(**TRUSS), "model"):  # type: ignore[arg-type]
        assert_same(asyncio.run(send(listener.getsockname()[1], case.request)), case)


@pytest.mark.parametrize("accept", ["", "Accept: application/json\r\n"])
async def test_faults_before_the_first_byte(accept: str) -> None:
    """With and without streaming. Without, the real server shows the Python exception."""
    case = next(case for case in read_recordings("08-*") if case.title == "how = value")
    service = TokenTextService("one")
    service.fault = ValueError("in the model")
    async with truss(service) as port:
        assert_same(await send(port, f'{HEAD}{accept}Content-Length: 16\r\n\r\n{{"prompt": "hi"}}'.encode()), case)


def test_number_of_recordings() -> None:
    assert len(read_recordings("01-*")) == 24 and len(read_recordings("04-*")) == 19 and len(read_recordings("12-*")) == 10
