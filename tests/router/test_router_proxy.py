"""`stoker route` over HTTP: forwarding, failures of replicas before and during a response, administration, and stored objects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_http import until
from routed import replicas, routed
from scripted_service import ScriptedService

from stoker.base.errors import ConfigError, QueueFullError, UnavailableError
from stoker.base.types import Delta, GenerationRequest
from stoker.router.core.settings import RoutingSettings
from stoker.router.proxy.failures import whole_parts
from stoker.router.proxy.health import NUM_MISSED
from stoker.router.proxy.paths import Kind, kind_of
from stoker.router.proxy.replicas_file import ReplicasFile
from stoker.router.proxy.serve import serve
from stoker.router.settings import RouterSettings, read_replicas

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32}
STREAMS = [
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/messages", {**CHAT, "model": "tiny", "stream": True}),
    ("/api/chat", {"model": "tiny", "messages": CHAT["messages"]}),
    ("/v2/models/ensemble/generate_stream", {"text_input": "hi", "max_tokens": 8, "stream": True}),
    ("/invocations", {"inputs": "hi", "stream": True}),
]


class HeldService(ScriptedService):
    """Each request generates one token, and no further one."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        async with aclosing(super().stream(request)) as batches:
            async for batch in batches:
                yield batch
                await asyncio.Event().wait()


class PacedService(ScriptedService):
    """Each token after the fourth waits for a release of `pace`."""

    def __init__(self, *answers: str, **limits: int) -> None:
        super().__init__(*answers, **limits)
        self.pace = asyncio.Semaphore(4)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        async with aclosing(super().stream(request)) as batches:
            async for batch in batches:
                await self.pace.acquire()
                yield batch


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await client.post(path, json=body, headers=headers)


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_answers_of_each_api_are_passed_on_unchanged(path: str, body: dict[str, Any]) -> None:
    async with replicas(ScriptedService("Hello")) as stubs, routed(stubs) as (_, client), httpx.AsyncClient() as direct:
        headers = {"x-request-id": "the-id"}
        expected = await direct.post(stubs[0].url + path, json=body, headers=headers)
        answer = await client.post(path, json=body, headers=headers)
        assert answer.status_code == expected.status_code == 200 and answer.headers["x-request-id"] == "the-id"
        assert {**answer.headers, "date": ""} == {**expected.headers, "date": ""}
        assert _without_ids(answer.text) == _without_ids(expected.text) and "H" in answer.text


def _without_ids(text: str) -> list[str]:
    """The parts of an answer without those that contain ids and times."""
    return [part for part in text.replace(",", "\n").split("\n") if not any(name in part for name in ('"id"', "created", "duration"))]


async def test_openai_s_client_works_through_the_router_and_errors_are_the_replica_s() -> None:
    async with replicas(ScriptedService("Hello there")) as stubs, routed(stubs) as (_, client):
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any-key-of-mine")
        stream = await sdk.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True)  # type: ignore[call-overload]
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == "Hello there"
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="other", messages=CHAT["messages"])  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await sdk.completions.create(model="tiny", prompt="hi", max_tokens=-1)


@pytest.mark.parametrize(("path", "body"), [*STREAMS[:3], ("/v1/completions", {"prompt": "hi"})])
async def test_requests_without_a_token_survive_the_end_of_their_replica(path: str, body: dict[str, Any]) -> None:
    services = [ScriptedService("Hello"), ScriptedService("Hello")]
    for service in services:
        service.hold = asyncio.Event()
    async with replicas(*services) as stubs, routed(stubs) as (router, client):
        requests = [asyncio.create_task(send(client, path, body, **{"x-session-id": str(i)})) for i in range(20)]
        await until(lambda: sum(len(service.requests) for service in services) == 16)  # four wait for room
        assert all(service.requests for service in services)
        await stubs[0].kill()
        services[1].hold.set()  # type: ignore[union-attr]
        answers = await asyncio.gather(*requests)
        assert [answer.status_code for answer in answers] == [200] * 20 and all("error" not in answer.text for answer in answers)
        await until(lambda: router.router.fleet.get(stubs[0].url).health == "unreachable")  # type: ignore[union-attr]
        assert (await send(client, path, body)).status_code == 200
        await stubs[0].restart()
        await until(lambda: router.router.fleet.available.bit_count() == 2)


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_a_stream_whose_replica_ends_is_closed_with_an_error_of_its_api(path: str, body: dict[str, Any]) -> None:
    service = HeldService("Hello")
    async with replicas(service) as stubs, routed(stubs) as (_, client), client.stream("POST", path, json=body) as answer:
        parts = answer.aiter_raw()
        text = await anext(parts)
        await stubs[0].kill()
        text += b"".join([part async for part in parts])
    separator = b"\n\n" if "event-stream" in answer.headers["content-type"] else b"\n"
    last = text.strip().split(separator)[-1].split(b"data: ")[-1]
    error = json.loads(last)["error"]
    assert "the replica failed in the middle of its response" in (error["message"] if isinstance(error, dict) else error)
    if path == "/v1/messages":
        assert b"event: error\n" in text and json.loads(last)["type"] == "error"


async def test_all_replicas_gone() -> None:
    async with replicas(ScriptedService()) as stubs, routed(stubs) as (_, client):
        await stubs[0].kill()
        answer = await send(client, "/v1/chat/completions", CHAT)
        assert answer.status_code == 503 and "replica" in answer.json()["error"]["message"]
        answer = await send(client, "/v1/messages", CHAT)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error"
        answer = await send(client, "/v2/models/ensemble/generate", {"text_input": "hi"})
        assert answer.status_code == 503 and isinstance(answer.json()["error"], str) and "retry-after" in answer.headers
        assert (await client.get("/health/ready")).status_code == 503 and (await client.get("/health/live")).status_code == 200


async def test_busy_and_draining_replicas_are_avoided() -> None:
    services = [ScriptedService("Hello"), ScriptedService("Hello")]
    async with replicas(*services) as stubs, routed(stubs) as (router, client):
        services[0].error = QueueFullError(9, 9, 1.0)
        for _ in range(4):
            assert (await send(client, "/v1/completions", {"prompt": "hi"})).status_code == 200
        services[1].error = services[0].error
        answer = await send(client, "/v1/completions", {"prompt": "hi"})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"  # of the last replica
        services[0].error, services[1].error = UnavailableError("the server is draining."), None
        for _ in range(4):
            assert (await send(client, "/v1/completions", {"prompt": "hi"})).status_code == 200
        assert not router.router.fleet.get(stubs[1].url).draining  # type: ignore[union-attr]


async def test_a_client_that_leaves_ends_its_request_on_the_replica() -> None:
    service = PacedService("x" * 4000, max_output_len=4096)
    body = {"prompt": "hi", "stream": True, "max_tokens": 4000}
    async with replicas(service) as stubs, routed(stubs) as (router, client):
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_raw())
        await until(lambda: service.pace.release() or service.left)  # servers notice it when they write
        (replica,) = router.router.fleet
        await until(lambda: replica.num_in_flight == 0)


async def test_conversations_and_sessions_stay_on_their_replica() -> None:
    services = [ScriptedService("Hello", max_input_len=8192) for _ in range(4)]
    async with replicas(*services) as stubs, routed(stubs) as (_, client):
        for number in range(8):
            messages = [{"role": "system", "content": f"{number} is the number of this conversation. " * 12}]
            for turn in range(4):
                messages.append({"role": "user", "content": f"turn {turn}: " + "x" * 300})
                await send(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        for service in services:
            first = Counter(request.prompt[:30] and bytes(request.prompt).split(b">")[1][:2] for request in service.requests)  # type: ignore[arg-type]
            assert all(count == 4 for count in first.values())
            service.requests.clear()
        for _ in range(5):
            await send(client, "/v1/completions", {"prompt": "hi", "user": "me"})
        assert sorted(len(service.requests) for service in services) == [0, 0, 0, 5]


async def test_replicas_are_added_drained_and_removed() -> None:
    async with replicas(ScriptedService("a"), ScriptedService("b")) as stubs, routed(stubs[:1]) as (_, client):
        added = await send(client, "/router/replicas", {"url": stubs[1].url})
        assert added.status_code == 200 and added.json()["health"] == "unknown"
        async with asyncio.timeout(10):
            while (await client.get("/router/replicas")).json()["replicas"][1]["health"] != "ready":
                await asyncio.sleep(0.01)
        assert (await send(client, "/router/replicas", {"url": stubs[1].url})).status_code == 400
        assert (await send(client, "/router/replicas", {"url": "ftp://x"})).status_code == 400
        drained = await send(client, "/router/replicas/drain", {"url": stubs[0].url})
        assert drained.json()["draining"] is True
        for _ in range(3):
            assert (await send(client, "/v1/completions", {"prompt": "hi"})).json()["choices"][0]["text"] == "b"
        await send(client, "/router/replicas/resume", {"url": stubs[0].url})
        removed = await client.delete("/router/replicas", params={"url": stubs[1].url})
        assert removed.status_code == 200 and len((await client.get("/router/replicas")).json()["replicas"]) == 1
        assert (await client.delete("/router/replicas", params={"url": stubs[1].url})).status_code == 404
        assert (await send(client, "/v1/completions", {"prompt": "hi"})).json()["choices"][0]["text"] == "a"
        assert (await client.get("/router/replicas/drain")).status_code == 405
        assert (await client.get("/router/x")).status_code == 404


async def test_keys_of_clients_replicas_and_administrators() -> None:
    keys = {"api_keys": ("client-key-1",), "replica_api_key": "replica-key", "admin_key": "admin-key-1"}
    async with replicas(ScriptedService("a"), api_keys=("replica-key",)) as stubs, routed(stubs, **keys) as (_, client):
        assert (await send(client, "/v1/completions", {"prompt": "hi"})).status_code == 401
        assert (await send(client, "/v1/completions", {"prompt": "hi"}, authorization="Bearer client-key-1")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/router/replicas")).status_code == 401
        assert (await client.get("/router/replicas", headers={"authorization": "Bearer client-key-1"})).status_code == 401
        assert (await client.get("/router/replicas", headers={"authorization": "Bearer admin-key-1"})).status_code == 200
    async with replicas(ScriptedService("a"), api_keys=("replica-key",)) as stubs, routed(stubs) as (router, _):
        (replica,) = router.router.fleet
        assert (replica.health, replica.reason) == ("not ready", "/health/replica answers 401")
    async with replicas(ScriptedService("a")) as stubs, routed(stubs, host="0.0.0.0") as (_, client):
        closed = await client.get("/router/replicas")
        assert closed.status_code == 401 and "--admin-key" in closed.text


async def test_a_replica_in_a_long_step_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor does not answer until the step ends. Load that it has not reported does not replace what is known."""
    service = ScriptedService("a")
    monkeypatch.setattr(service, "stats", asyncio.Event().wait)
    async with replicas(service) as stubs, routed(stubs, health_interval_s=60.0) as (router, client):
        (replica,) = router.router.fleet
        assert (replica.health, replica.models, replica.max_in_flight) == ("ready", {"tiny"}, 2 * service.info.limits.max_batch_size)
        replica.num_others = 5
        for _ in range(NUM_MISSED + 1):
            await router.checker.check(replica)
        assert (replica.health, replica.num_others) == ("ready", 5)
        assert (await send(client, "/v1/completions", {"prompt": "hi"})).status_code == 200
        service.is_ready = False  # as after step_timeout_s
        await router.checker.check(replica)
        assert (replica.health, replica.reason) == ("not ready", "tiny: its executor does not answer")
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_the_replicas_follow_a_file(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    async with replicas(ScriptedService("a"), ScriptedService("b"), ScriptedService("c")) as stubs:
        first, second, third = (stub.url for stub in stubs)
        async with routed(stubs[:1]) as (router, _):
            watched = ReplicasFile(str(file), router)

            async def names(text: str) -> list[str]:
                file.write_text(text)
                await watched.apply()
                return [replica.name for replica in router.router.fleet]

            assert await names(f"# comment\n{second}\n\n{first}\n") == [first, second]
            assert await names(f"{third}\n") == [first, third]  # the first one is of the command line
            with pytest.raises(ConfigError, match=r"replicas_file=.*replica 'nonsense' is refused"):
                await names("nonsense\n")
            assert len(router.router.fleet) == 2
            file.unlink()
            with pytest.raises(ConfigError, match="cannot be read"):
                await watched.apply()
            await watched.apply()  # reported once
            assert await names("") == [first]


async def test_stored_objects_are_found_on_their_replica() -> None:
    async with replicas(*(ScriptedService("a") for _ in range(3))) as stubs, routed(stubs) as (router, client):
        created = (await send(client, "/v1/responses", {"input": "hi", "store": True})).json()
        assert (await client.get(f"/v1/responses/{created['id']}")).json()["id"] == created["id"]
        for _ in range(4):
            again = await send(client, "/v1/responses", {"input": "more", "previous_response_id": created["id"]})
            assert again.status_code == 200, again.text
        router._owners._known.clear()  # as in another router
        again = await send(client, "/v1/responses", {"input": "more", "previous_response_id": created["id"]})
        assert again.status_code == 200, again.text
        assert (await client.get("/v1/responses/resp_unknown")).status_code == 404
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
        upload = {"file": ("b.jsonl", json.dumps(line).encode())}
        stored = (await client.post("/v1/files", files=upload, data={"purpose": "batch"})).json()
        router._owners._known.clear()
        request = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await send(client, "/v1/batches", request)
        assert batch.status_code == 200, batch.text
        assert (await client.get(f"/v1/batches/{batch.json()['id']}")).json()["input_file_id"] == stored["id"]
        assert stored["id"] in [each["id"] for each in (await client.get("/v1/files")).json()["data"]]


async def test_metrics_and_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stoker.router.access"):
        logging.getLogger("stoker").propagate = True
        async with replicas(ScriptedService("Hello", max_input_len=4096)) as stubs, routed(stubs) as (_, client):
            await send(client, "/v1/completions", {"prompt": "x" * 2000, "user": "me"}, **{"x-tenant-id": "team"})
            answer = await send(client, "/v1/completions", {"prompt": 5})
            text = (await client.get("/metrics")).text
            url = stubs[0].url
    line = json.loads(caplog.messages[0])
    assert {name: line[name] for name in ("path", "status", "replica", "attempts", "session", "tenant", "prompt_tokens")} == {
        "path": "/v1/completions", "status": 200, "replica": url, "attempts": 1, "session": "me", "tenant": "team", "prompt_tokens": 500
    }  # fmt: skip
    assert answer.status_code == 400
    assert f'stoker_router_attempts_total{{outcome="ok",replica="{url}"}} 2.0' in text
    assert f'stoker_router_replica_ready{{replica="{url}"}} 1.0' in text and "stoker_router_prompt_tokens_total 5" in text


async def test_requests_wait_for_room_and_are_refused_when_too_many_wait() -> None:
    service = ScriptedService("Hello")
    service.hold = asyncio.Event()
    settings = RoutingSettings(max_in_flight=2, max_queue_size=3)
    async with replicas(service) as stubs, routed(stubs, routing=settings) as (router, client):
        requests = [asyncio.create_task(send(client, "/v1/completions", {"prompt": "hi"})) for _ in range(8)]
        await until(lambda: sum(request.done() for request in requests) == 3)
        await until(lambda: router.router.num_waiting == 3 and len(service.requests) == 2)
        service.hold.set()
        answers = await asyncio.gather(*requests)
        assert Counter(answer.status_code for answer in answers) == {200: 5, 429: 3}
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/v1/chat/completions", Kind.GENERATE),
        ("POST", "/v2/models/ensemble/generate_stream", Kind.GENERATE),
        ("POST", "/tokenize", Kind.ANY),
        ("GET", "/v1/models", Kind.ANY),
        ("GET", "/v1/responses/resp_1/input_items", Kind.OWNED),
        ("POST", "/v1/batches", Kind.HOME),
        ("POST", "/v2/repository/models/a/unload", Kind.ALL),
        ("POST", "/v2/systemsharedmemory/region/r/register", Kind.ALL),
        ("GET", "/v2/logging", Kind.ANY),
    ],
)
def test_kinds_of_paths(method: str, path: str, kind: Kind) -> None:
    assert kind_of(method, path).kind is kind


def test_only_whole_events_are_passed_on() -> None:
    assert whole_parts(b"text/event-stream; charset=utf-8", b"data: 1\n\ndata: ") == 9
    assert whole_parts(b"text/event-stream", b"data: 1\n") == 0
    assert whole_parts(b"application/x-ndjson", b"{}\n{") == 3
    assert whole_parts(b"application/octet-stream", b"abc") == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": ("127.0.0.1:8000",)}, r"replica '127\.0\.0\.1:8000' is refused\. Use an address such as"),
        ({"replicas": ("http://a:8000/v1",)}, "is refused"),
        ({"replicas": ("http://a:99999",)}, "is refused"),
        ({"replicas": ("http://a", "http://a")}, "is given twice"),
        ({"replicas": ("http://a",), "session_header": "X Session"}, "session_header='X Session' is no name of a header"),
        ({"replicas": ("http://a",), "http_port": 9, "grpc_port": 9}, "grpc_port=9 is refused: http_port is the same port"),
        ({"replicas": ("http://a",), "health_interval_s": 0.0}, "health_interval_s=0.0 is refused"),
        ({"replicas": ("http://a",), "tls_key": "k"}, "tls_certificate is not set"),
        ({"replicas": ("http://a",), "admin_key": "short"}, "an API key is refused"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**fields)


def test_files_that_cannot_be_read_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no replicas are given"):
        serve(RouterSettings())
    with pytest.raises(ConfigError, match=r"tokenizer='.*' has no tokenizer\.json"):
        serve(RouterSettings(replicas=("http://a",), tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"replicas_file=.* cannot be read"):
        serve(RouterSettings(replicas_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="is given twice"):
        read_replicas("http://a\nhttp://a\n", "f")
