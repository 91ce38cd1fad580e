"""A protocol is added with one module and one row of the registry, and the server does the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from echo_protocol import Echo
from live_http import live_server, until
from scripted_service import ScriptedService

from stoker.server.protocols.registry import PROTOCOLS

PATH = "/echo/generate"
KEY = "secret-key-1"


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROTOCOLS, "_rows", dict(PROTOCOLS._rows))
    PROTOCOLS.add("echo", Echo)


@pytest.mark.parametrize("protocols", [("echo",), ()], ids=["named", "all"])
async def test_a_request_over_http(protocols: tuple[str, ...]) -> None:
    service = ScriptedService("Hello, wörld 🎉!")
    async with live_server(service, protocols=protocols) as url, httpx.AsyncClient(base_url=url) as client:
        whole = await client.post(PATH, json={"text": "hi", "max_tokens": 50})
        assert (whole.status_code, whole.json()) == (200, {"text": "Hello, wörld 🎉!"})
        streamed = await client.post(PATH, json={"text": "hi", "max_tokens": 50, "stream": True})
        assert (streamed.headers["content-type"], streamed.text) == ("text/plain", "Hello, wörld 🎉!")
        assert (await client.get("/v1/models")).status_code == (404 if protocols else 200)
    assert [request.prompt for request in service.requests] == [[2, 104, 105]] * 2


async def test_errors_have_the_format_of_the_protocol() -> None:
    service = ScriptedService()
    async with live_server(service) as url, httpx.AsyncClient(base_url=url) as client:
        for body, status, text in (
            ({"text": "hi", "max_tokens": 0}, 400, "max_tokens=0 is refused: it must be a whole number from 1 to 1048576."),
            ({"text": "hi", "max_token": 1}, 400, "Did you mean max_tokens?"),
            ({"text": "hi", "temperature": 1}, 400, "temperature=1 is refused: decoding is greedy."),
            ({"text": "x" * 300}, 400, "max_input_len is 256"),
            ([], 400, "array, not an object"),
        ):
            answer = await client.post(PATH, json=body)
            assert answer.status_code == status and text in answer.json()["echo_error"]
        service.fails_after = 0
        for stream in (False, True):
            answer = await client.post(PATH, json={"text": "hi", "stream": stream})
            assert (answer.status_code, answer.json()) == (500, {"echo_error": "the step failed."})
        assert (await client.get(PATH)).headers["allow"] == "POST"
        assert "echo_error" in (await client.get("/echo/nope")).json()


async def test_authentication_metrics_and_cancellation_need_no_code() -> None:
    service = ScriptedService("x" * 100)
    service.hold = asyncio.Event()
    async with live_server(service, api_keys=(KEY,)) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post(PATH, json={"text": "hi"})).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        request = asyncio.create_task(client.post(PATH, json={"text": "hi", "max_tokens": 100}))
        await until(lambda: service.num_streaming)
        request.cancel()
        await until(lambda: service.left)
        service.hold.set()
        assert (await client.post(PATH, json={"text": "hi"})).status_code == 200
        metrics = (await client.get("/metrics")).text
    for status, count in ((401, 1), (499, 1), (200, 1)):
        assert f'stoker_http_responses_total{{route="{PATH}",status="{status}"}} {count}.0' in metrics


def test_the_guide_shows_this_protocol() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "protocol.md").read_text()
    assert f"```python\n{(Path(__file__).parent / 'echo_protocol.py').read_text()}```" in guide
