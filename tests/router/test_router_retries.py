"""How often a request is sent to replicas that fail, and that it is never sent again after a part of its answer was passed on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from routed import replicas, routed
from scripted_service import ScriptedService
from test_router_proxy import STREAMS, HeldService, send

from stoker.base.errors import UnavailableError
from stoker.router.core.settings import RoutingSettings
from stoker.server.replica_report import ReplicaReport

NUM_REPLICAS = 4
PROMPT = {"prompt": "hi"}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class BrokenReplica:
    """A server whose health checks succeed, and that sends `sent` for every other request and closes the connection."""

    def __init__(self, sent: bytes) -> None:
        self.num_requests = 0
        self._sent = sent

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[BrokenReplica]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/health/replica" in await reader.readuntil(b"\r\n\r\n"):
            report = msgspec.json.encode(ReplicaReport(models=["tiny"], max_batch_size=4))
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(report), report))
        else:
            self.num_requests += 1
            writer.write(self._sent)
        await writer.drain()
        writer.close()


def settings(max_retries: int) -> dict[str, Any]:
    """Of a router that learns only from requests that replicas have failed."""
    return {"routing": RoutingSettings(max_retries=max_retries, max_failures=100), "health_interval_s": 60.0}


def attempts(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The attempts of each request in the access log."""
    return [json.loads(record.getMessage())["attempts"] for record in caplog.records if record.name == "stoker.router.access"]


@pytest.fixture(autouse=True)
def access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stoker.router.access")
    logging.getLogger("stoker").propagate = True


@pytest.mark.parametrize("max_retries", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("sent", [b"", STREAM_HEAD], ids=["no answer", "no body"])
async def test_connections_that_close(sent: bytes, max_retries: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each replica gets the request at most once, also if the setting allows more attempts than there are replicas."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(BrokenReplica(sent).started()) for _ in range(NUM_REPLICAS)]
        _, client = await stack.enter_async_context(routed(stubs, **settings(max_retries)))  # type: ignore[arg-type]
        for path, body in (("/v1/completions", PROMPT), STREAMS[0]):
            before = [stub.num_requests for stub in stubs]
            answer = await send(client, path, body)
            counts = [stub.num_requests - number for stub, number in zip(stubs, before, strict=True)]
            assert sum(counts) == min(1 + max_retries, NUM_REPLICAS) and max(counts) == 1
            message = answer.json()["error"]["message"]
            last = next(stub for stub in stubs if f"the replica {stub.url} failed: " in message)
            assert answer.status_code == 503 and counts[stubs.index(last)]
            assert ("Response payload is not completed" if sent else "Server disconnected") in message
            assert ("no other replica is available" in message) is (max_retries >= NUM_REPLICAS)
        assert attempts(caplog) == [min(1 + max_retries, NUM_REPLICAS)] * 2


@pytest.mark.parametrize("max_retries", [0, 2, 9])
async def test_replicas_that_answer_with_a_failure(max_retries: int, caplog: pytest.LogCaptureFixture) -> None:
    """The client gets the reason of the last one."""
    services = [ScriptedService("Hello") for _ in range(NUM_REPLICAS)]
    for service in services:
        service.error = UnavailableError("the executor is lost.")
    async with replicas(*services) as stubs, routed(stubs, **settings(max_retries)) as (_, client):
        answer = await send(client, "/v1/completions", PROMPT)
        assert answer.status_code == 503 and "the executor is lost" in answer.json()["error"]["message"]
        counts = [len(service.requests) for service in services]
        assert sum(counts) == min(1 + max_retries, NUM_REPLICAS) and max(counts) == 1
        assert attempts(caplog) == [sum(counts)]


@pytest.mark.parametrize("max_retries", [0, 2])
async def test_replicas_that_refuse_connections(max_retries: int, caplog: pytest.LogCaptureFixture) -> None:
    async with replicas(*(ScriptedService("Hello") for _ in range(NUM_REPLICAS))) as stubs, routed(stubs, **settings(max_retries)) as found:
        router, client = found
        for stub in stubs:
            await stub.kill()
        answer = await send(client, "/v1/completions", PROMPT)
        assert answer.status_code == 503 and "Cannot connect to host" in answer.json()["error"]["message"]
        assert attempts(caplog) == [1 + max_retries]
        failed = [router.metrics.attempts.labels(stub.url, "failed")._value.get() for stub in stubs]
        assert sum(failed) == 1 + max_retries and max(failed) == 1


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_a_request_is_not_sent_again_after_a_token(path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Its replica ends after the first token, while others could answer it and retries are left."""
    services = [HeldService("Hello") for _ in range(NUM_REPLICAS)]
    async with replicas(*services) as stubs, routed(stubs, **settings(9)) as (_, client), client.stream("POST", path, json=body) as answer:
        parts = answer.aiter_raw()
        first = await anext(parts)
        (streaming,) = (stub for stub, service in zip(stubs, services, strict=True) if service.requests)
        await streaming.kill()
        rest = b"".join([part async for part in parts])
    assert first and b"the replica failed in the middle of its response" in rest
    assert sum(len(service.requests) for service in services) == 1 and attempts(caplog) == [1]


async def test_requests_that_change_something_are_sent_once() -> None:
    """A file may have been stored when its replica closes the connection."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(BrokenReplica(b"").started()) for _ in range(NUM_REPLICAS)]
        _, client = await stack.enter_async_context(routed(stubs, **settings(9)))  # type: ignore[arg-type]
        answer = await client.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
        assert answer.status_code == 503 and sum(stub.num_requests for stub in stubs) == 1
