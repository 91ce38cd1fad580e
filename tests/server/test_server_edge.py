"""What all protocols share: bodies, API keys, ids, limits, outcomes, metrics, and errors in the format of each protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from live_http import asgi_client, live_server, until
from scripted_service import ScriptedService, make_context

from stoker.base.errors import ConfigError, QueueFullError, UnavailableError
from stoker.runtime.request import ExecutorStats
from stoker.server.application import make_app
from stoker.server.http.connection import MAX_HEAD_BYTES
from stoker.server.replica_report import RECENT_S, ReplicaReport
from stoker.server.settings import ServerSettings

BODY = {"prompt": "hi", "max_tokens": 4}
KEY = "secret-key-1"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b"{", "truncated"),
        (b"{'prompt': 1}", "byte 1"),
        (b'{"prompt": "hi", "temperature": NaN}', "byte"),
        (b'{"prompt": "hi", "temperature": Infinity}', "byte"),
        (b'{"prompt": "hi", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "\\ud800"}', ""),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["prompt"]', "array, not an object"),
        (b"null", "null, not an object"),
    ],
)
async def test_invalid_bodies(body: bytes, message: str) -> None:
    async with asgi_client(ScriptedService()) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = await client.post(path, content=body, headers=JSON)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "bad_json" and message in error["message"]


async def test_a_long_body_is_refused_before_it_is_read() -> None:
    service = ScriptedService()
    async with live_server(service, max_request_bytes=1 << 20) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x" * (10 << 20)})
        assert answer.status_code == 413 and "max_request_bytes is 1048576" in answer.json()["error"]["message"]

        async def chunks() -> Any:
            for _ in range(64):
                yield b"x" * (1 << 16)

        assert (await client.post("/v1/completions", content=chunks(), headers=JSON)).status_code == 413
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert len(service.requests) == 1


async def test_the_error_of_a_long_prompt_has_its_length_and_the_limit() -> None:
    async with asgi_client(ScriptedService()) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x" * 10_000_000})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "prompt" and "10000000" in error["message"] and "2048" in error["message"]


async def test_headers_that_are_too_long_end_the_connection() -> None:
    async with live_server(ScriptedService()) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/health", headers={f"x-{i}": "y" * 8000 for i in range(2 * MAX_HEAD_BYTES // 8000)})
        assert answer.status_code == 431
        assert (await client.get("/health")).status_code == 200


async def test_api_keys() -> None:
    async with asgi_client(ScriptedService(), api_keys=(KEY, "secret-key-2")) as client:
        for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}):
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error" and KEY not in answer.text
        answer = await client.post("/v2/models/ensemble/generate", json={})
        assert answer.status_code == 401 and isinstance(answer.json()["error"], str)
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v2/health/ready")).status_code == 200
        for key in (KEY, "secret-key-2"):
            for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"Api-Key {key}"}, {"x-api-key": key}):
                assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        both = {"authorization": "Bearer wrong-key", "x-api-key": KEY}
        assert (await client.post("/v1/completions", json=BODY, headers=both)).status_code == 401


async def test_cors() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with asgi_client(ScriptedService(), cors_origins=("https://a.example",), api_keys=(KEY,)) as client:
        answer = await client.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        assert (await client.options("/v1/completions", headers={**preflight, "origin": "https://b.example"})).status_code == 400
    async with asgi_client(ScriptedService()) as client:
        assert "access-control-allow-origin" not in (await client.post("/v1/completions", json=BODY, headers=preflight)).headers


async def test_request_ids_are_echoed_or_created() -> None:
    async with asgi_client(ScriptedService()) as client:
        assert (await client.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        assert (await client.post("/v1/completions", json={}, headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        for bad in ("", "x" * 129, "a\tb"):
            created = (await client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"]
            assert created != bad and len(created) == 32
        assert len({(await client.get("/health")).headers["x-request-id"] for _ in range(3)}) == 3


async def test_a_full_queue_has_retry_after() -> None:
    service = ScriptedService()
    service.error = QueueFullError(8, 8, 2.4)
    async with asgi_client(service) as client:
        for body in (BODY, {**BODY, "stream": True}):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
            assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_a_lost_executor() -> None:
    service = ScriptedService()
    service.is_ready = False
    async with asgi_client(service) as client:
        answer = await client.get("/health")
        assert answer.status_code == 503 and answer.json()["models"][0]["model"] == "tiny"
        assert (await client.get("/health/live")).status_code == 200
        answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status_code == 503 and "retry-after" in answer.headers and answer.json()["error"]["type"] == "server_error"
    service.is_ready, service.error = True, UnavailableError("The executor is gone.")
    async with asgi_client(service) as client:
        assert (await client.post("/v1/completions", json={**BODY, "stream": True})).status_code == 503


async def test_a_sequence_that_fails() -> None:
    service = ScriptedService("abc")
    service.fails_after = 1
    async with asgi_client(service) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})):
            answer = await client.post(path, json={**body, "stream": True})
            assert answer.status_code == 200
            *_, error, done, end = answer.text.split("\n\n")
            assert error.startswith('data: {"error":{"message":"the step failed."') and done == "data: [DONE]" and end == ""


async def test_the_details_of_an_unexpected_error_are_logged_and_not_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ScriptedService()
    monkeypatch.setattr(service, "encode", lambda *args, **kwargs: 1 / 0)
    async with asgi_client(service) as client:
        answer = await client.post("/tokenize", json={"prompt": "hi"})
    assert answer.status_code == 500 and "division" not in answer.text and "ZeroDivisionError" in caplog.text


async def test_unknown_paths_and_methods_have_the_format_of_their_protocol() -> None:
    async with asgi_client(ScriptedService()) as client:
        answer = await client.get("/v1/nope")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_route"
        answer = await client.get("/v1/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert isinstance((await client.get("/v2/nope")).json()["error"], str)


async def test_only_the_protocols_of_the_settings_are_served() -> None:
    async with asgi_client(ScriptedService(), protocols=("kserve",)) as client:
        assert (await client.get("/v1/models")).status_code == 404
        assert (await client.get("/v2/health/live")).status_code == 200
        assert (await client.get("/health")).status_code == 200
    with pytest.raises(ConfigError, match=r"unknown protocol 'opnai'.*openai"):
        async with asgi_client(ScriptedService(), protocols=("opnai",)):
            pass


async def test_models_and_tokens() -> None:
    async with asgi_client(ScriptedService(), ScriptedService(name="org/other")) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list" and [row["id"] for row in listed["data"]] == ["tiny", "org/other"]
        assert listed["data"][0]["max_model_len"] == 384 and listed["data"][0]["object"] == "model"
        assert (await client.get("/v1/models/org/other")).json() == listed["data"][1]
        assert (await client.get("/v1/models/nope")).status_code == 404
        tokens = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        texts = ["\x02", "h", "bytes:\\xc3", "bytes:\\xa9"]
        assert tokens == {"count": 4, "max_model_len": 384, "tokens": [2, 104, 195, 169], "token_strs": texts}
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}], "model": "tiny"})).json()
        assert bytes(chat["tokens"]).decode() == "<user>hi<assistant>"
        assert (await client.post("/detokenize", json={"tokens": [104, 195, 169]})).json() == {"prompt": "hé"}
        for path, body in (
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [-1]}),
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "add_special_token": False}),
            ("/tokenize", {"prompt": "a", "return_token_strs": 1}),
            ("/detokenize", {"tokens": [104], "skip": True}),
        ):
            assert (await client.post(path, json=body)).status_code == 400
        assert (await client.get("/version")).json()["version"]


async def test_metrics_count_outcomes_tokens_and_responses() -> None:
    service = ScriptedService("abc")
    async with asgi_client(service) as client:
        await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json={**BODY, "max_tokens": 2, "stream": True})
        await client.post("/v1/completions", json={**BODY, "prompt": "x" * 300})
        service.error = QueueFullError(1, 1, 1.0)
        await client.post("/v1/completions", json=BODY)
        text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for outcome in ("stop", "length", "refused", "queue_full"):
        assert lines[f'stoker_requests_total{{model="tiny",outcome="{outcome}"}}'] == "1.0"
    assert lines['stoker_prompt_tokens_total{model="tiny"}'] == "6.0"
    assert lines['stoker_output_tokens_total{model="tiny"}'] == "5.0"
    assert lines['stoker_request_output_tokens_count{model="tiny"}'] == "2.0"
    assert lines['stoker_kv_blocks{model="tiny"}'] == "10.0" and lines['stoker_kv_blocks_used{model="tiny"}'] == "3.0"
    assert lines['stoker_batch_occupancy{model="tiny"}'] == "0.5"
    assert lines['stoker_http_responses_total{route="/v1/completions",status="200"}'] == "2.0"
    assert lines['stoker_http_responses_total{route="/v1/completions",status="429"}'] == "1.0"


class LateStatistics:
    """Replaces `service.stats`: an executor with seven waiting sequences that answers each query when `answers` is set."""

    def __init__(self, service: ScriptedService) -> None:
        self.answers, self.num_queries, self._current = asyncio.Event(), 0, service.stats

    async def __call__(self) -> ExecutorStats:
        self.num_queries += 1
        await self.answers.wait()
        return msgspec.structs.replace(await self._current(), num_waiting=7)


async def test_metrics_of_an_executor_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last known statistics are reported with their age, and one query is in flight however often metrics are read."""
    monkeypatch.setattr("stoker.server.metrics.statistics.ANSWER_S", 0.01)
    service = ScriptedService()
    late = LateStatistics(service)
    async with asgi_client(service) as client:

        async def scrape() -> dict[str, float]:
            lines = (await client.get("/metrics")).text.splitlines()
            return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("stoker_")}

        age, queue = 'stoker_statistics_age_seconds{model="tiny"}', 'stoker_queue_size{model="tiny"}'
        first = await scrape()
        monkeypatch.setattr(service, "stats", late)
        second, third = await scrape(), await scrape()
        assert first[queue] == second[queue] == third[queue] == 0 and late.num_queries == 1
        assert first[age] < second[age] < third[age] and second[age] >= 0.01
        assert (await client.get("/load")).json() == {"server_load": 0} and late.num_queries == 1
        service.is_ready = False
        assert (await scrape())[age] > third[age]
        service.is_ready = True
        late.answers.set()
        await until(lambda: not asyncio.all_tasks() - {asyncio.current_task()})
        assert (await scrape())[queue] == 7 and late.num_queries == 2


async def test_metrics_without_an_answer_contain_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.server.metrics.statistics.ANSWER_S", 0.01)
    service = ScriptedService()
    monkeypatch.setattr(service, "stats", asyncio.Event().wait)
    async with asgi_client(service) as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 200 and 'stoker_queue_size{model="tiny"}' not in answer.text
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_tokens_of_a_disconnected_client_are_counted() -> None:
    service = ScriptedService("abcdefgh" * 10)
    async with live_server(service) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 80, "stream": True}) as answer:
            lines = answer.aiter_lines()
            for _ in range(10):
                await anext(lines)
            service.hold = asyncio.Event()
        await until(lambda: not service.num_streaming)
        text = (await client.get("/metrics")).text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert counts['stoker_requests_total{model="tiny",outcome="cancelled"}'] == "1.0"
    assert 5 <= float(counts['stoker_output_tokens_total{model="tiny"}']) <= 80


async def test_the_metrics_port_serves_only_metrics_and_health() -> None:
    context = await make_context(ScriptedService(), metrics_port=8002)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(context)), base_url="http://stoker:8002") as client:
        assert (await client.get("/metrics")).status_code == 200 and (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 404
        assert (await client.get("http://stoker:8000/v1/models")).status_code == 200


async def test_unknown_parsers_are_refused_when_the_server_starts() -> None:
    for setting in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match="unknown"):
            make_app(await make_context(ScriptedService(), **{setting: "qwe"}))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/completions", {**BODY, "prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v2/models/ensemble/generate", {"text_input": "hi", "max_tokens": 5}),
    ],
)
async def test_a_disconnected_client_cancels_its_requests(path: str, body: dict[str, Any], stream: bool) -> None:
    service = ScriptedService("x" * 100)
    service.hold = asyncio.Event()
    if path.startswith("/v2"):
        path += "_stream" if stream else ""
    else:
        body = {**body, "stream": stream}
    async with live_server(service) as url:
        num_requests = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        async with httpx.AsyncClient(base_url=url) as client:
            call = asyncio.create_task(client.post(path, json=body))
            await until(lambda: service.num_streaming == num_requests)
            call.cancel()
        await until(lambda: service.num_streaming == 0)
        assert len(service.left) == num_requests
        async with httpx.AsyncClient(base_url=url) as client:
            counts = (await client.get("/metrics")).text
            assert f'stoker_requests_total{{model="tiny",outcome="cancelled"}} {num_requests}.0' in counts
            service.hold.set()
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_client_that_disconnects_during_a_stream_cancels_its_request() -> None:
    service = ScriptedService("x" * 100)
    service.hold = asyncio.Event()
    async with live_server(service) as url, httpx.AsyncClient(base_url=url) as client:
        service.hold.set()
        async with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 100, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                service.hold.clear()
                break
        await until(lambda: service.num_streaming == 0)
    assert len(service.left) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": ("short",)},
        {"tls_key": "x"},
        {"num_frontends": 0},
        {"http_port": 70000},
        {"max_request_bytes": 5},
        {"drain_timeout_s": -1},
    ],
)
def test_invalid_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**settings)
    assert "short" not in str(caught.value)


async def test_a_server_reports_its_load_and_models_to_routers() -> None:
    service = ScriptedService()
    async with asgi_client(service, api_keys=("secret-key",), grpc_port=8001, add_special_tokens=False) as client:
        assert (await client.get("/health/replica")).status_code == 401
        headers = {"Authorization": "Bearer secret-key"}
        report = (await client.get("/health/replica", headers=headers)).json()
        assert (report["models"], report["max_batch_size"], report["grpc_port"]) == (["tiny"], 4, 8001)
        assert (report["add_special_tokens"], report["num_running"], report["info"]["vocab_size"]) == (False, 0, 256)
        service.is_ready = False
        report = (await client.get("/health/replica", headers=headers)).json()
        assert (report["models"], report["reason"]) == ([], "tiny: its executor does not answer")


async def test_a_report_to_routers_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor answers between two steps. During one, the report has its last known load and the age of it."""
    service = ScriptedService()
    late = LateStatistics(service)
    async with asgi_client(service) as client:

        async def report() -> ReplicaReport:
            return msgspec.json.decode((await client.get("/health/replica")).content, type=ReplicaReport)

        monkeypatch.setattr(service, "stats", late)
        first = await report()  # during the first step after the start
        assert (first.models, first.age_s, first.is_recent, first.num_sequences) == (["tiny"], None, False, 1)
        assert (first.max_batch_size, first.tokens_per_block) == (service.info.limits.max_batch_size, service.info.limits.tokens_per_block)
        late.answers.set()
        await until(lambda: not asyncio.all_tasks() - {asyncio.current_task()})
        late.answers.clear()
        second, third = await report(), await report()
        assert second.age_s is not None and third.age_s is not None and second.age_s < third.age_s
        assert (second.models, third.models, second.num_waiting, third.num_waiting, late.num_queries) == (["tiny"], ["tiny"], 7, 7, 2)
        late.answers.set()
        await until(lambda: not asyncio.all_tasks() - {asyncio.current_task()})


@pytest.mark.parametrize(("age_s", "expected"), [(0.0, 0), (RECENT_S, 0), (RECENT_S + 0.1, 1), (None, 1)])
def test_a_server_whose_load_is_not_recent_is_not_idle(age_s: float | None, expected: int) -> None:
    assert ReplicaReport(models=["tiny"], age_s=age_s).num_sequences == expected
    assert ReplicaReport(models=["tiny"], age_s=age_s, num_running=3, num_waiting=2).num_sequences == 5
