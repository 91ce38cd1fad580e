"""The page, its files and its JSON over HTTP: what needs a key, what is cached, and what the options serve."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from console_server import ENGINE, NAME, console_context
from scripted_service import ScriptedService, make_context

from stoker.base import logging as base_logging
from stoker.base.errors import UnavailableError
from stoker.runtime.live_state import LiveState, LiveStep
from stoker.server.application import make_app
from stoker.server.metrics import live_view
from stoker.server.protocol import Context

USER = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(context: Context) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(context)), base_url="http://stoker") as http:
        yield http


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(await make_context(ScriptedService(), **settings)) as http:
        yield http


async def test_the_page_and_its_files() -> None:
    async with scripted() as http:
        page = await http.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert (await http.get("/console")).content == page.content
        names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(names) == 3 and all(name.startswith("./console/") for name in names)
        total = len(page.content)
        for name in names:
            file = await http.get(f"/{name.removeprefix('./')}", headers={"accept-encoding": "identity"})
            total += len(file.content)
            assert file.status_code == 200 and file.headers["content-type"].startswith(("text/", "image/svg+xml"))
            assert not re.search(rb"https?://(?!www\.w3\.org/)", file.content), "something of another host"
            packed = await http.get(f"/{name.removeprefix('./')}", headers={"accept-encoding": "gzip"})
            assert packed.headers["content-encoding"] == "gzip" and packed.content == file.content  # httpx decompresses
            again = await http.get(f"/{name.removeprefix('./')}", headers={"if-none-match": file.headers["etag"]})
            assert again.status_code == 304 and not again.content
        assert total < 250_000
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert page.headers["x-content-type-options"] == "nosniff" and page.headers["referrer-policy"] == "no-referrer"
        for wrong in ("/console/absent.js", "/console/..%2findex.html", "/console/", "/console/api/absent"):
            assert (await http.get(wrong)).status_code == 404


def test_the_compressed_files_are_reproducible() -> None:
    from stoker.server.protocols.console.static_files import _read

    file = _read("console.js", b"let a = 1;" * 100)
    assert file == _read("console.js", b"let a = 1;" * 100) and gzip.decompress(file.compressed) == file.body


async def test_only_the_page_needs_no_key() -> None:
    async with scripted(api_keys=("secret-key-1",)) as http:
        assert (await http.get("/")).status_code == (await http.get("/console/console.js")).status_code == 200
        for path in ("server", "live", "engine", "log"):
            refused = await http.get(f"/console/api/{path}", params={"api_key": "secret-key-1"})
            assert refused.status_code == 401 and "API key" in refused.json()["error"]
        headers = {"authorization": "Bearer secret-key-1"}
        assert (await http.get("/console/api/live", headers=headers)).status_code == 200


async def test_an_admin_key_closes_the_api_to_clients() -> None:
    async with scripted(api_keys=("secret-key-1",), admin_key="admin-key-1") as http:
        assert (await http.get("/")).status_code == 200
        for path in ("server", "live", "log"):
            statuses = [
                (await http.get(f"/console/api/{path}", headers={"authorization": f"Bearer {key}"})).status_code
                for key in ("secret-key-1", "admin-key-1", "other-key-1")
            ]
            assert statuses == [401, 200, 401]
            assert (await http.get(f"/console/api/{path}")).status_code == 401


async def test_the_option_decides_where_the_console_is() -> None:
    async def statuses(**settings: Any) -> list[int]:
        async with scripted(**settings) as http:
            return [(await http.get(path)).status_code for path in ("/", "/console", "/console/api/live")]

    assert await statuses() == await statuses(protocols=("openai", "console")) == await statuses(protocols=("kserve",), console=True)
    assert await statuses() == [200, 200, 200]
    assert await statuses(protocols=("openai",)) == await statuses(protocols=("console",), console=False) == [404, 404, 404]
    assert await statuses(console=False) == [200, 404, 404]  # the page of links
    assert await statuses(protocols=("truss",), console=True) == [200, 200, 200]
    async with scripted(protocols=("truss",), console=True) as http:
        assert (await http.get("/")).json() is True and "Stoker console" in (await http.get("/console")).text


async def test_the_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MIN_AGE_S", 0.0)
    async with console_context(tmp_path, answer="word " * 400, step_s=0.002) as context, client_of(context) as http:
        answer = asyncio.create_task(http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 200}))
        async with asyncio.timeout(20):
            while not (view := (await http.get("/console/api/live", params={"first_step": 0, "detail": 1})).json())["steps"]:
                await asyncio.sleep(0.05)
        state = view["state"]
        assert view["model"] == NAME and view["models"] == [{"name": NAME, "version": "1", "state": "ready", "reason": ""}]
        (row,) = state["running"]
        assert row["request_id"] and row["max_tokens"] == 200 and row["status"] == "running"
        assert state["stats"]["num_running"] == 1 and sum(state["tiers"][0]["used"]) == row["num_blocks"]
        assert set(view["names"].values()) == {row["request_id"]}
        number, _, duration_s, rows, num_decodes, num_verifies, num_new = view["steps"][0]
        assert (number, view["row_sets"][rows], num_decodes, num_verifies) == (0, [row["seq_id"]], 0, 0) and duration_s > 0
        assert num_new == [row["prompt_tokens"]] and len(view["row_sets"]) == 1  # all steps have the same row
        assert (await answer).status_code == 200
        ended = (await http.get("/console/api/live")).json()
        assert ended["steps"] == [] and "running" not in ended["state"]
        ended = (await http.get("/console/api/live", params={"first_step": 10})).json()
        assert [step[0] for step in ended["steps"]] == list(range(10, ended["state"]["next_step"]))
        assert sum(ended["latency"]["ttft"]["counts"]) == 1
        assert 0 < sum(ended["latency"]["inter_token"]["counts"]) <= 199  # tokens that arrive together count once
        assert len(ended["latency"]["ttft"]["counts"]) == len(ended["latency"]["ttft"]["bounds_s"]) + 1


async def test_pages_share_the_requests_to_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    service, calls = ScriptedService(), []

    async def live(*, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        calls.append(first_step)
        return LiveState(await service.stats(), 0.0, 0.0, [], [], [], [], [], 7, [], {})

    monkeypatch.setattr(service, "live", live)
    async with client_of(await make_context(service)) as http:
        for _ in range(5):
            await asyncio.gather(http.get("/console/api/live?first_step=0"), http.get("/console/api/live"))
        assert len(calls) <= 2 and calls[0] in (0, None)


async def test_another_executor_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MIN_AGE_S", 0.0)
    service, calls, started_s = ScriptedService(), [], 1.0

    async def live(*, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        calls.append(first_step)
        steps = [LiveStep(number, 0.0, 0.1, 0, 1, 0, []) for number in range(first_step or 0, 3)]
        return LiveState(await service.stats(), 9.0, started_s, [], [], [], steps, [[5]], 3, [], {5: f"of {started_s}"})

    monkeypatch.setattr(service, "live", live)
    async with client_of(await make_context(service)) as http:
        for _ in range(2):
            view = (await http.get("/console/api/live?first_step=0")).json()
            assert [step[0] for step in view["steps"]] == [0, 1, 2] and view["names"] == {"5": "of 1.0"}
        started_s = 2.0
        view = (await http.get("/console/api/live?first_step=0")).json()
        assert [step[0] for step in view["steps"]] == [0, 1, 2] and view["names"] == {"5": "of 2.0"}
        assert calls == [0, 3, 3, 0]


async def test_a_model_that_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedService()

    async def lost(*, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        raise UnavailableError("The executor is unavailable: it ended.")

    monkeypatch.setattr(service, "live", lost)
    context = await make_context(service)
    async with client_of(context) as http:
        view = (await http.get("/console/api/live")).json()
        assert view["state"] is None and view["unavailable"] == "The executor is unavailable: it ended."
        assert (await http.get("/console/api/log")).status_code == 200
        assert (await http.get("/console/api/engine")).status_code == 503
        await context.repository.unload(service.model_name)
        view = (await http.get("/console/api/live")).json()
        assert view["models"][0]["state"] == "unavailable" and "unloaded" in view["unavailable"]


@pytest.mark.parametrize("query", ["first_step=-1", "first_step=x", "first_step=nan", "first_step=1e300"])
async def test_bad_numbers_are_refused(query: str) -> None:
    async with scripted() as http:
        refused = await http.get(f"/console/api/live?{query}")
        assert refused.status_code == 400 and "first_step" in refused.json()["error"]


async def test_the_engine_card(tmp_path: Path) -> None:
    async with console_context(tmp_path) as context, client_of(context) as http:
        card = (await http.get("/console/api/engine")).json()
        for name in ("model", "recipe", "limits", "checks", "checkpoint"):
            assert card[name] == ENGINE[name]
        assert (card["weight_bytes"], card["num_bytes"]) == (81264640, 81264640 + 1563270) and "files" not in card
        assert sum(size for name, size in card["memory"].items() if name != "total") == card["memory"]["total"] == 8 << 30
        (tmp_path / "config.json").write_text("[]")
        assert (await http.get("/console/api/engine")).status_code == 503


async def test_the_log_is_bounded_and_in_order(tmp_path: Path) -> None:
    logging.getLogger("stoker").handlers.clear()
    base_logging.configure("INFO")
    log = base_logging.get_logger("stoker.test")
    async with console_context(tmp_path) as context, client_of(context) as http:
        for i in range(base_logging.MAX_LINES + 20):
            log.info("line %d", i)
        log.error("x" * 10_000)
        lines = (await http.get("/console/api/log")).json()["lines"]
        assert len(lines) == base_logging.MAX_LINES and lines[-1]["level"] == "ERROR" and len(lines[-1]["text"]) < 4100
        assert lines == sorted(lines, key=lambda line: line["time_s"]) and lines[-2]["text"] == f"line {base_logging.MAX_LINES + 19}"
        log.warning("the newest")
        newer = (await http.get("/console/api/log", params={"after": lines[-1]["time_s"]})).json()["lines"]
        assert [(line["text"], line["logger"]) for line in newer] == [("the newest", "stoker.test")]


async def test_a_request_with_logprobs_and_another_origin(tmp_path: Path) -> None:
    """What the page sends passes the checks of cross-site requests."""
    async with console_context(tmp_path) as context, client_of(context) as http:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
        answer = await http.post("/v1/chat/completions", json=body, headers={"origin": "http://stoker"})
        content = answer.json()["choices"][0]["logprobs"]["content"]
        assert [len(row["top_logprobs"]) for row in content] == [2, 2, 2]
