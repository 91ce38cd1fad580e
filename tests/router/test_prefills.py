"""Prompts that another replica computes: their lease ends whenever they do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from live_http import until
from routed import StubReplica, replicas, routed
from scripted_service import ScriptedService

from stoker.router.core.policy import Decision, Route
from stoker.router.core.prefix import token_prefix
from stoker.router.core.replica import Replica, ReplicaState
from stoker.router.core.router import Router
from stoker.router.core.settings import RoutingSettings
from stoker.router.proxy.prefills import Prefills
from stoker.runtime.transfer.address import TransferAddress


async def test_a_prompt_that_is_cancelled_before_it_is_sent_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call for which it is computed can fail at once, before the task of the prompt has run."""
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", "s" * 32)
    router = Router(RoutingSettings(disaggregate_tokens=64))
    for name in ("decode", "prefill"):
        added = router.fleet.add(f"http://{name}:1")
        router.fleet.set_transfer(added, TransferAddress(name, name, 1))
        router.fleet.set_health(added, ReplicaState.READY, 0.0)
    decode, prefill = router.fleet
    route = Route(prefix=token_prefix(list(range(256)), 16))
    counted = SimpleNamespace(prefills=SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None)))

    async def send(replica: Replica, ticket: str) -> str:
        return ""

    lease = router.begin(route, Decision(decode, 0))
    begun = Prefills(router, cast(Any, counted), cast(Any, None)).begin(route, lease, send)
    assert begun is not None and begun.replica is prefill and prefill.num_in_flight == 1
    begun.end()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (prefill.num_in_flight, prefill.prefill_tokens) == (0, 0)


class TransferringService(ScriptedService):
    """Requests wait until `hold` is set."""

    def __init__(self, role: str) -> None:
        super().__init__("Hello", max_input_len=1024)
        self.hold = asyncio.Event()
        self._info = msgspec.structs.replace(self._info, transfer=TransferAddress(role, "127.0.0.1", 1))


async def test_the_end_of_the_replica_that_reads_repeats_the_request_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed again with tickets of its own, because each is used once, and the first computation is cancelled."""
    monkeypatch.setenv("STOKER_CLUSTER_TOKEN", "s" * 32)
    services = [TransferringService(role) for role in ("prefill", "decode", "decode")]
    prefill = services[0]
    async with (
        replicas(*services) as stubs,
        routed(stubs, health_interval_s=60.0, routing=RoutingSettings(disaggregate_tokens=64)) as (router, client),
    ):

        def reading() -> list[tuple[ScriptedService, StubReplica]]:
            return [(service, stub) for service, stub in zip(services[1:], stubs[1:], strict=True) if service.num_streaming]

        answering = asyncio.create_task(client.post("/v1/completions", json={"prompt": list(range(3, 203)), "max_tokens": 5}))
        await until(lambda: prefill.num_streaming == 1 and len(reading()) == 1)
        ((killed, stub),) = reading()
        await stub.kill()
        await until(lambda: len(prefill.requests) == 2 and [service for service, _ in reading()] not in ([], [killed]))
        await until(lambda: len(prefill.left) == 1)
        for service in services:
            service.hold.set()
        answer = await answering
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "Hello"
        await until(lambda: not any(replica.num_in_flight or replica.prefill_tokens for replica in router.router.fleet))
