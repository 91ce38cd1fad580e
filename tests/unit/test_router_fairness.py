"""Fairness of requests that wait in a router: between tenants, between adapters of one tenant, and between sessions of one adapter."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import combinations, product

import pytest

from stoker.router.core.fair_queue import FairQueue
from stoker.router.core.policy import Route
from stoker.router.core.prefix import token_prefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Router
from stoker.router.core.settings import RoutingSettings

MAX_COST = 50
Path = tuple[str, str, str]  # tenant, adapter, session
PATHS = [*product("ab", "xy", "12"), ("c", "", "")]


class Observer:
    """Counts the service of all flows of all levels, without virtual times.

    For each two flows of one parent it records the difference of their services while requests of both wait. In any period of such a
    time, start-time fair queueing bounds the difference by the sum of the largest requests of the two.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Path, int]] = {}  # number → (path, cost), in order of arrival
        self._differences: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}  # of two flows: now, lowest, highest

    def flows(self, level: int) -> set[tuple[str, ...]]:
        return {path[: level + 1] for path, _ in self.waiting.values()}

    def note_pairs(self) -> None:
        """Forget pairs of which one has no waiting request, and begin with those of which both have some."""
        pairs = {pair for level in range(3) for pair in combinations(sorted(self.flows(level)), 2) if pair[0][:-1] == pair[1][:-1]}
        self._differences = {pair: self._differences.get(pair, [0, 0, 0]) for pair in pairs}

    def serve(self, number: int) -> None:
        path, cost = self.waiting[number]
        assert number == next(n for n, (other, _) in self.waiting.items() if other == path), "the requests of a session are in order"
        for (first, second), found in self._differences.items():
            if path[: len(first)] in (first, second):
                found[0] += cost if path[: len(first)] == first else -cost
                found[1:] = min(found[1:2] + found[:1]), max(found[2:] + found[:1])
                assert found[2] - found[1] <= 2 * MAX_COST, f"{first} and {second} wait and receive unequal service"
        del self.waiting[number]


@pytest.mark.parametrize("seed", range(12))
def test_flows_of_every_level_receive_equal_service_while_they_wait(seed: int) -> None:
    """Requests of random cost arrive, leave and are served. In each period only some flows are busy, so that others are idle."""
    dice = random.Random(seed)
    queue: FairQueue[int] = FairQueue()
    observer = Observer()
    numbers: dict[int, int] = {}  # request → its number in the queue
    for _ in range(12):
        busy = dice.sample(PATHS, dice.randint(1, len(PATHS)))
        for _ in range(dice.randint(1, 80)):
            path, cost, request = dice.choice(busy), dice.choice([1, dice.randint(1, MAX_COST), MAX_COST]), len(numbers)
            numbers[request] = queue.push(request, path, cost)
            observer.waiting[request] = path, cost
            observer.note_pairs()
            if dice.random() < 0.1:
                left = dice.choice(list(observer.waiting))
                queue.discard(numbers[left])
                del observer.waiting[left]
            elif dice.random() < 0.5:
                observer.serve(queue.pop())
            observer.note_pairs()
        while len(queue) > dice.randint(0, 30):
            observer.serve(queue.pop())
            observer.note_pairs()
        assert len(queue) == len(observer.waiting)
    while observer.waiting:
        observer.serve(queue.pop())
        observer.note_pairs()
    with pytest.raises(IndexError):
        queue.pop()


async def served(counts: dict[Path, int], num_tokens: int = 15) -> list[Path]:
    """The flows in the order in which a router with one replica and room for one request serves this many requests of each."""
    router = Router(RoutingSettings(max_in_flight=1))
    router.fleet.set_health(router.fleet.add("replica"), ReplicaState.READY, router.clock())
    running = await router.acquire(Route())
    order: list[Path] = []

    async def send(path: Path) -> None:
        tenant, adapter, session = path
        route = Route(prefix=token_prefix([1] * num_tokens, 16), tenant=tenant, adapter=adapter, session=session)
        lease = await router.acquire(route)
        order.append(path)
        lease.succeed()

    async with asyncio.TaskGroup() as group:
        for path, count in counts.items():
            for _ in range(count):
                group.create_task(send(path))
        while router.num_waiting < sum(counts.values()):
            await asyncio.sleep(0)
        running.succeed()
    return order


async def test_a_tenant_with_many_requests_delays_others_little() -> None:
    order = await served({("busy", "", ""): 20, ("quiet", "", ""): 1})
    assert order.index(("quiet", "", "")) <= 1 and len(order) == 21


@pytest.mark.parametrize(
    ("paths", "level"),
    [
        ([("tenant", "first", f"session {i}") for i in range(6)] + [("tenant", "second", "session")], 1),
        ([("tenant", "adapter", "first"), ("tenant", "adapter", "second")], 2),
        ([("first", adapter, session) for adapter in "xyz" for session in "12"] + [("second", "", "")], 0),
    ],
    ids=["adapters", "sessions", "tenants"],
)
async def test_requests_of_one_size_are_served_in_turns(paths: list[Path], level: int) -> None:
    """The flow that is last has as many requests as all others together, so that turns last to the end, however these are divided."""
    counts = dict.fromkeys(paths, 6)
    counts[paths[-1]] = 6 * (len(paths) - 1)
    order = [path[level] for path in await served(counts)]
    assert len(order) == sum(counts.values())
    assert all(set(order[i : i + 2]) == {paths[0][level], paths[-1][level]} for i in range(0, len(order), 2))


async def test_sessions_and_adapters_share_what_their_tenant_receives() -> None:
    """A tenant receives half. Of that, one adapter receives half with one session, and the other one with three."""
    counts = {("one", "x", "1"): 60, ("two", "x", "1"): 30} | {("two", "y", session): 10 for session in "123"}
    half = Counter((await served(counts))[:60])
    assert half == {("one", "x", "1"): 30, ("two", "x", "1"): 15, **{("two", "y", session): 5 for session in "123"}}
