"""Requests that wait while no replica is available (unavailable_timeout_s)."""

from __future__ import annotations

import asyncio

import pytest

from stoker.base.errors import UnavailableError
from stoker.router.core.policy import Route
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Router
from stoker.router.core.settings import RoutingSettings


async def test_a_request_waits_for_the_first_replica() -> None:
    router = Router(RoutingSettings(unavailable_timeout_s=30))
    calls: list[int] = []
    router.on_unavailable = lambda: calls.append(router.num_waiting)
    waiting = [asyncio.create_task(router.acquire(Route())) for _ in range(3)]
    while router.num_waiting < 3:
        await asyncio.sleep(0)
    replica = router.fleet.add("http://127.0.0.1:1")
    router.fleet.set_health(replica, ReplicaState.READY, router.clock())
    router.serve_waiting()
    assert [(await lease).replica for lease in waiting] == [replica] * 3 and calls == [0, 1, 2] and not router.num_waiting


async def test_a_failed_replica_counts_again_after_a_health_check() -> None:
    router = Router(RoutingSettings(unavailable_timeout_s=30))
    replica = router.fleet.add("http://127.0.0.1:1")
    router.fleet.set_health(replica, ReplicaState.READY, router.clock())
    waiting = asyncio.create_task(router.acquire(Route(), [replica]))
    while not router.num_waiting:
        await asyncio.sleep(0)
    router.serve_waiting()
    assert router.num_waiting == 1  # the replica has failed this request
    router.fleet.set_health(replica, ReplicaState.READY, router.clock() + 1)
    router.serve_waiting()
    assert (await waiting).replica is replica


async def test_the_wait_ends() -> None:
    router = Router(RoutingSettings(unavailable_timeout_s=0.01))
    with pytest.raises(UnavailableError, match="no replicas"):
        await router.acquire(Route())
    with pytest.raises(UnavailableError, match="no replicas"):
        await Router(RoutingSettings()).acquire(Route())
    with pytest.raises(UnavailableError):
        await router.acquire(Route(), wait_for_available=False)
    assert not router.num_waiting
