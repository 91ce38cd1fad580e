"""The routing decision: indexes, loads and policies against slow references, and breakers and leases."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.errors import ConfigError, QueueFullError, UnavailableError
from stoker.router.core.block_index import BlockIndex, Level, PredictedIndex, match_levels
from stoker.router.core.breaker import Breaker
from stoker.router.core.consistent_hash import ConsistentHash, hash64
from stoker.router.core.load_table import LoadTable
from stoker.router.core.policy import Route
from stoker.router.core.prefix import PromptPrefix, text_prefix, token_prefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Router
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.kv.prefix_index import PrefixIndex, pack

SIZE = 16


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def router(num_replicas: int, clock: Clock | None = None, **settings: object) -> Router:
    """A router whose replicas are ready and have the names r0, r1, …"""
    made = Router(RoutingSettings(**settings), clock or Clock())
    for i in range(num_replicas):
        replica = made.fleet.add(f"r{i}")
        replica.publishes_events = True
        made.fleet.set_health(replica, ReplicaState.READY, made.clock())
    return made


def names(made: Router) -> list[str]:
    return [replica.name for replica in made.fleet]


# Prefixes.


@given(st.lists(st.integers(0, 1 << 30), max_size=100), st.sampled_from(["", "salt", (3, "salt")]))
def test_hashes_of_a_prompt_equal_those_of_the_prefix_index(tokens: list[int], root: str) -> None:
    index, node = PrefixIndex(100), root
    expected = []
    for i in range((len(tokens) - 1) // SIZE):
        node = index.add((node, pack(tokens[i * SIZE : (i + 1) * SIZE])), i)
        expected.append(int.from_bytes(node.digest[-8:], "big"))
    prefix = token_prefix(tokens, SIZE, root)
    assert (list(prefix.hashes), prefix.num_tokens, prefix.exact) == (expected, len(tokens), True)


def test_texts_share_the_hashes_of_their_common_prefix() -> None:
    first, second = text_prefix("a" * 700), text_prefix("a" * 600 + "b" * 200)
    assert len(first.hashes) == 2 and first.hashes == second.hashes[:2] and len(second.hashes) == 3
    assert not set(first.hashes) & set(text_prefix("a" * 700, "another model").hashes)
    assert text_prefix("\ud800" * 300).hashes  # a lone surrogate, which JSON can contain


# Indexes.

BLOCKS = st.lists(st.integers(0, 15), max_size=6)
CHANGES = st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, 3), BLOCKS), max_size=40)


@given(CHANGES, BLOCKS, st.integers(1, 15))
def test_the_block_index_equals_sets(changes: list[tuple[str, int, list[int]]], prompt: list[int], replicas: int) -> None:
    index, sets = BlockIndex(), [set[int]() for _ in range(4)]
    for kind, slot, blocks in changes:
        if kind == "store":
            index.store(slot, blocks)
            sets[slot].update(blocks)
        elif kind == "remove":
            index.remove(slot, blocks)
            sets[slot].difference_update(blocks)
        else:
            index.clear(slot)
            sets[slot].clear()
    assert [index.num_blocks(slot) for slot in range(4)] == list(map(len, sets))
    assert index.masks == {b: sum(1 << s for s in range(4) if b in sets[s]) for b in range(16) if any(b in each for each in sets)}
    depths = {s: next((i for i, b in enumerate(prompt) if b not in sets[s]), len(prompt)) for s in range(4) if replicas >> s & 1}
    levels = match_levels(PromptPrefix(prompt, SIZE, 99, True), (index.masks,), replicas)
    assert levels == [Level(sum(1 << s for s in depths if depths[s] == d), d) for d in sorted(set(depths.values()))]


@given(st.lists(st.tuples(st.integers(0, 3), BLOCKS, st.integers(0, 4)), max_size=40))
def test_predicted_blocks_expire(prompts: list[tuple[int, list[int], int]]) -> None:
    index, now, last = PredictedIndex(5.0, 8), 0.0, dict[int, float]()
    for slot, blocks, pause in prompts:
        now += pause
        index.store(slot, blocks, now)
        for block in blocks:
            last.pop(block, None)
            last[block] = now
    fresh = [block for block in list(last)[-8:] if last[block] > now - 5]
    assert set(index.masks) == set(fresh)
    for slot in range(4):
        index.clear(slot)
    assert not index.masks


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 5)), min_size=1), st.integers(1, (1 << 31) - 1))
def test_the_least_loaded_replicas_of_a_set(changes: list[tuple[int, int]], wanted: int) -> None:
    table, loads = LoadTable(), dict[int, int]()
    for slot, load in changes:
        if load < 0:
            table.remove(slot)
            loads.pop(slot, None)
        else:
            table.set(slot, load)
            loads[slot] = load
    if among := {slot: load for slot, load in loads.items() if wanted >> slot & 1}:
        lowest = min(among.values())
        assert table.least(sum(1 << slot for slot in among)) == (lowest, sum(1 << s for s in among if among[s] == lowest))


def test_only_keys_of_a_replica_move_when_a_replica_leaves() -> None:
    hashing, again = ConsistentHash(), ConsistentHash()
    for slot in range(20):
        hashing.add(slot, f"http://replica-{slot}")
        again.add(19 - slot, f"http://replica-{slot}")  # other slots in another router
    keys = [hash64(f"session {i}") for i in range(2000)]
    before = [hashing.pick((1 << 20) - 1, key) for key in keys]
    assert before == [19 - again.pick((1 << 20) - 1, key) for key in keys]
    assert max(Counter(before).values()) < 3 * 100
    hashing.remove(7)
    after = [hashing.pick((1 << 20) - 1 & ~(1 << 7), key) for key in keys]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 7)
    assert {hashing.pick(0b101, key) for key in keys} == {0, 2}


# Policies.


@given(st.data())
def test_the_prefix_policy_has_the_lowest_cost_of_all(data: st.DataObject) -> None:
    """Compared with the cost of every replica, one by one."""
    made = router(data.draw(st.integers(1, 12)), decode_cost=10, session_bonus=40, adapter_bonus=70)
    dice = random.Random(data.draw(st.integers()))
    prompts = [token_prefix([dice.randrange(2) for _ in range(dice.randrange(1, 80))], SIZE) for _ in range(10)]
    for replica in made.fleet:
        made.fleet.stored.store(replica.slot, [value for prompt in prompts for value in prompt.hashes if dice.random() < 0.5])
        replica.num_others, replica.prefill_tokens = dice.randrange(8), dice.randrange(60)
        made.fleet.refresh(replica, 0.0)
    served: set[tuple[str, str]] = set()
    for prefix in prompts:
        route = Route(prefix=prefix, session=dice.choice(["", "s"]), adapter=dice.choice(["", "a", "b"]))
        home = made.fleet.hashing.pick(made.fleet.all, hash64(route.session)) if route.session else -1
        costs = {}
        for replica in made.fleet:
            held = made.fleet.stored._blocks[replica.slot] | {v for v, m in made.fleet.recent.masks.items() if m >> replica.slot & 1}
            depth = next((i for i, value in enumerate(prefix.hashes) if value not in held), len(prefix.hashes))
            bonus = 40 * (replica.slot == home) + 70 * ((route.adapter, replica.name) in served)
            costs[replica.name] = replica.load(10) + prefix.num_tokens - depth * SIZE - bonus
        decision = made.choose(route)
        assert decision is not None and costs[decision.replica.name] == min(costs.values())
        if route.adapter:
            served.add((route.adapter, decision.replica.name))
        made.begin(route, decision)


def test_a_prompt_follows_its_prefix_before_events_report_it() -> None:
    clock = Clock()
    made = router(8, clock)
    first, longer = token_prefix([1] * 200, SIZE), token_prefix([1] * 200 + [2] * 100, SIZE)
    chosen = made.choose(Route(prefix=first))
    assert chosen is not None and chosen.num_cached == 0
    made.begin(Route(prefix=first), chosen).succeed()
    again = made.choose(Route(prefix=longer))
    assert again is not None and (again.replica, again.num_cached) == (chosen.replica, 192)
    clock.now += 60  # no event has come: the blocks were not retained
    made.fleet.refresh_all(clock.now)
    later = made.choose(Route(prefix=longer))
    assert later is not None and later.num_cached == 0


def test_load_outweighs_a_short_prefix() -> None:
    made = router(2, decode_cost=64)
    prefix = token_prefix([1] * 33, SIZE)
    holder, other = made.fleet
    made.fleet.stored.store(holder.slot, prefix.hashes)
    decision = made.choose(Route(prefix=prefix))
    assert decision is not None and decision.replica is holder
    holder.num_others = 1
    made.fleet.refresh(holder, 0.0)
    decision = made.choose(Route(prefix=prefix))
    assert decision is not None and decision.replica is other


def test_other_policies_ignore_prefixes() -> None:
    made = router(3, policy="round_robin")
    chosen = [made.choose(Route(session="s")) for _ in range(6)]
    assert [decision.replica.name for decision in chosen if decision] == ["r0", "r1", "r2"] * 2
    made = router(3, policy="least_loaded")
    leases = [made.begin(Route(), decision) for _ in range(6) if (decision := made.choose(Route()))]
    assert Counter(lease.replica.name for lease in leases) == {"r0": 2, "r1": 2, "r2": 2}


def test_requests_go_to_replicas_that_serve_their_model() -> None:
    made = router(3)
    for replica, models in zip(made.fleet, (["a"], ["a", "b"], ["b"]), strict=True):
        made.fleet.set_models(replica, models)
    assert made.fleet.models() == ["a", "b"]
    for model, expected in (("a", {"r0", "r1"}), ("b", {"r1", "r2"}), (None, {"r0", "r1", "r2"})):
        found = {decision.replica.name for i in range(40) if (decision := made.choose(Route(model, session=str(i))))}
        assert found == expected


# Requests that wait.


async def test_a_full_router_refuses_requests() -> None:
    made = router(1, max_in_flight=1, max_queue_size=1, queue_timeout_s=0.02)
    lease = await made.acquire(Route())
    waiting = asyncio.create_task(made.acquire(Route()))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await made.acquire(Route())
    with pytest.raises(UnavailableError, match=r"no replica had room for 0\.02 s"):
        await waiting
    assert made.num_waiting == 0
    waiting = asyncio.create_task(made.acquire(Route()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert made.num_waiting == 0
    lease.cancel()
    assert made.choose(Route()) is not None


async def test_waiting_requests_end_when_no_replica_is_left() -> None:
    made = router(1, max_in_flight=1)
    await made.acquire(Route())
    waiting = asyncio.create_task(made.acquire(Route()))
    await asyncio.sleep(0)
    (replica,) = made.fleet
    made.remove(replica)
    with pytest.raises(UnavailableError, match="the router has no replicas"):
        await waiting


# Replicas that fail, drain, and come back.


def test_a_breaker_opens_after_failures_and_closes_after_a_trial() -> None:
    breaker = Breaker(2)
    breaker.on_failure(0.0)
    breaker.on_success()
    breaker.on_failure(1.0)
    assert breaker.allows(1.0)
    breaker.on_failure(1.0)
    assert breaker.state == "open" and not breaker.allows(1.9) and breaker.allows(2.0)
    breaker.on_send()
    assert breaker.state == "trial" and not breaker.allows(2.0)
    breaker.on_cancel()
    assert breaker.allows(2.0)
    breaker.on_send()
    breaker.on_failure(2.0)
    assert not breaker.allows(3.9) and breaker.allows(4.0)
    breaker.on_send()
    breaker.on_success()
    assert breaker.state == "closed" and breaker.allows(4.0)


def test_failing_and_draining_replicas_get_no_requests() -> None:
    clock = Clock()
    made = router(3, clock, max_failures=1)
    first, second, third = made.fleet
    first.draining = True
    made.fleet.refresh(first, clock.now)
    lease = made.begin(Route(), made._policy.choose(Route(), 1 << second.slot))
    lease.fail()
    lease.succeed()  # has no effect any more
    assert {made.choose(Route(session=str(i))).replica.name for i in range(20)} == {"r2"}  # type: ignore[union-attr]
    made.fleet.set_health(third, ReplicaState.UNREACHABLE, clock.now, "refused")
    with pytest.raises(UnavailableError, match=r"1 draining, 1 paused after failures, 1 unreachable"):
        made.choose(Route())
    clock.now += 1.5
    made.fleet.refresh_all(clock.now)
    decision = made.choose(Route())
    assert decision is not None and decision.replica is second
    made.begin(Route(), decision)
    with pytest.raises(UnavailableError):  # one request on trial
        made.choose(Route())


def test_an_unreachable_replica_holds_no_blocks_any_more() -> None:
    made = router(2)
    prefix = token_prefix([1] * 100, SIZE)
    replica, _ = made.fleet
    made.fleet.stored.store(replica.slot, prefix.hashes)
    made.fleet.set_health(replica, ReplicaState.UNREACHABLE, 0.0)
    made.fleet.set_health(replica, ReplicaState.READY, 0.0)
    assert not made.fleet.stored.masks


def test_a_removed_slot_is_used_again_without_the_former_state() -> None:
    made = router(3)
    replica = made.fleet.get("r1")
    assert replica is not None and "r1" in made.fleet and len(made.fleet) == 3
    prefix = token_prefix([1] * 100, SIZE)
    made.fleet.stored.store(replica.slot, prefix.hashes)
    lease = made.begin(Route(prefix=prefix), made._policy.choose(Route(prefix=prefix), 1 << replica.slot))
    made.remove(replica)
    added = made.fleet.add("new")
    made.fleet.set_health(added, ReplicaState.READY, 0.0)
    lease.succeed()
    assert added.slot == replica.slot and names(made) == ["r0", "r2", "new"]
    assert (added.num_in_flight, made.fleet.loads.get(added.slot)) == (0, 0)
    decision = made.choose(Route(prefix=prefix))
    assert decision is not None and decision.num_cached == 0
    with pytest.raises(ValueError, match="already"):
        made.fleet.add("new")


def test_the_load_falls_when_the_first_token_arrives() -> None:
    made = router(1, decode_cost=64)
    route = Route(prefix=token_prefix([1] * 100, SIZE))
    lease = made.begin(route, made._policy.choose(route, 1))
    assert made.fleet.loads.get(0) == 164
    lease.start_decode()
    assert made.fleet.loads.get(0) == 64
    lease.succeed()
    assert made.fleet.loads.get(0) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "random"}, r"policy='random' is refused\. Use one of: prefix"),
        ({"max_in_flight": 0}, "max_in_flight=0 is refused"),
        ({"queue_timeout_s": 0.0}, r"queue_timeout_s=0\.0 is refused"),
        ({"max_retries": -1}, "max_retries=-1 is refused"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingSettings(**fields)
