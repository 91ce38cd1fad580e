"""Replays every exchange recorded from a real Triton server and compares the status and body of the response."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_http import live_app
from recorded_models import catalogue
from scripted_service import ScriptedService, make_context

from stoker.base import logging
from stoker.server.application import Application
from stoker.server.protocols.health.protocol import Health
from stoker.server.protocols.kserve.core import Core
from stoker.server.protocols.kserve.http.protocol import KServeHTTP

pytestmark = pytest.mark.compatibility(
    protocol="Triton",
    client="HTTP requests recorded from tritonserver",
    version="2.51",
    feature="every route of the HTTP API, bodies byte for byte",
)

RECORDED = Path(__file__).parent / "recorded"
# Responses that cannot be equal, for the reasons in docs/triton.md. Each has its own test.
DIFFERENT = {"01_server_meta", "07_stats_gen", "07b_stats_all", "21b_root", "40_metrics"}
DIFFERENT_TYPE = {"38d_generate_GET"}  # the router responds with 405, with one content type for all routes
CASES = sorted(path.stem for path in RECORDED.glob("*.txt") if path.stem not in DIFFERENT)


def split(raw: bytes) -> tuple[int, str, bytes]:
    """(status, content type, body without chunked coding) of a raw response."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        rest, body = body, b""
        while size := int(rest.partition(b"\r\n")[0], 16):
            rest = rest.partition(b"\r\n")[2]
            body, rest = body + rest[:size], rest[size + 2 :]
    return int(lines[0].split()[1]), headers["content-type"], body


def recorded(case: str) -> tuple[bytes, bytes]:
    raw = (RECORDED / f"{case}.txt").read_bytes().removeprefix(b">>> REQUEST\n")
    request, response = re.split(rb"\n<<< RESPONSE[^\n]*\n", raw, maxsplit=1)
    return request, response


async def replay(request: bytes) -> bytes:
    context = await make_context(ScriptedService("abc"))
    app = Application(context, {"health": Health(context), "kserve": KServeHTTP(context, Core(context, catalogue()))})
    async with live_app(app, context.settings) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        response = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    return response


@pytest.fixture
def info_level() -> Iterator[None]:
    """The log of a server that was started without options."""
    before = logging.current()
    logging.apply(logging.LogConfig(level="INFO"))
    yield
    logging.apply(before)


@pytest.mark.usefixtures("info_level")
@pytest.mark.parametrize("case", CASES)
async def test_responses_equal_the_recording(case: str) -> None:
    request, response = recorded(case)
    status, kind, body = split(await replay(request))
    expected_status, expected_kind, expected_body = split(response)
    assert (status, body) == (expected_status, expected_body)
    assert kind == expected_kind or case in DIFFERENT_TYPE


async def test_name_and_extensions_of_the_server() -> None:
    request, response = recorded("01_server_meta")
    ours, theirs = (json.loads(split(raw)[2]) for raw in (await replay(request), response))
    assert list(ours) == list(theirs) and ours["name"] == "stoker"
    assert set(ours["extensions"]) - set(theirs["extensions"]) == {"generate"}
    unsupported = {"classification", "sequence"}
    assert set(theirs["extensions"]) - set(ours["extensions"]) == unsupported


@pytest.mark.parametrize("case", ["07_stats_gen", "07b_stats_all"])
async def test_statistics_have_tritons_fields(case: str) -> None:
    request, response = recorded(case)
    ours, theirs = (json.loads(split(raw)[2])["model_stats"] for raw in (await replay(request), response))
    assert [row["name"] for row in ours] == [row["name"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other) and list(mine["inference_stats"]) == list(other["inference_stats"])
    if case == "07_stats_gen":
        assert ours == theirs
