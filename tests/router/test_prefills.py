"""Prompts that another replica computes: their lease ends whenever they do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

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
