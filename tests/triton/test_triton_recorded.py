"""Every exchange that was recorded from a real Triton server, replayed: the bytes of its request, and its answer's status and body."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from live_http import live_app
from recorded_models import catalogue
from scripted_service import ScriptedService, make_context

from stoker.server.application import Application
from stoker.server.protocols.health.protocol import Health
from stoker.server.protocols.kserve.core import Core
from stoker.server.protocols.kserve.http.protocol import KServeHTTP

RECORDED = Path(__file__).parent / "recorded"
# Answers that cannot be equal; docs/triton.md has the reasons. Each has a test of its own below or in test_triton_http.py.
OWN = {"01_server_meta", "07_stats_gen", "07b_stats_all", "21b_root", "40_metrics"}
OWN_TYPE = {"38d_generate_GET"}  # 405 is told by the router, in one type for every route
CASES = sorted(path.stem for path in RECORDED.glob("*.txt") if path.stem not in OWN)


def split(raw: bytes) -> tuple[int, str, bytes]:
    """(status, content type, body) of a raw response, chunks joined."""
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
    app = Application(context, [Health(context), KServeHTTP(context, Core(context, catalogue()))])
    async with live_app(app, context.settings) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    return answer


@pytest.mark.parametrize("case", CASES)
async def test_answers_equal_the_recording(case: str) -> None:
    request, response = recorded(case)
    status, kind, body = split(await replay(request))
    expected_status, expected_kind, expected_body = split(response)
    assert (status, body) == (expected_status, expected_body)
    assert kind == expected_kind or case in OWN_TYPE


async def test_the_server_tells_its_own_name_and_extensions() -> None:
    request, response = recorded("01_server_meta")
    ours, theirs = (json.loads(split(raw)[2]) for raw in (await replay(request), response))
    assert list(ours) == list(theirs) and ours["name"] == "stoker"
    assert set(ours["extensions"]) - set(theirs["extensions"]) == {"generate"}
    left_out = {"classification", "sequence", "model_repository(unload_dependents)", "system_shared_memory", "cuda_shared_memory"}
    assert set(theirs["extensions"]) - set(ours["extensions"]) == left_out


@pytest.mark.parametrize("case", ["07_stats_gen", "07b_stats_all"])
async def test_statistics_have_tritons_fields(case: str) -> None:
    request, response = recorded(case)
    ours, theirs = (json.loads(split(raw)[2])["model_stats"] for raw in (await replay(request), response))
    assert [row["name"] for row in ours] == [row["name"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other) and list(mine["inference_stats"]) == list(other["inference_stats"])
    if case == "07_stats_gen":
        assert ours == theirs
