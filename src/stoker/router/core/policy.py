"""The policies: which replica a request is sent to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from stoker.router.core.block_index import Level, match_levels
from stoker.router.core.consistent_hash import hash64
from stoker.router.core.fleet import Fleet
from stoker.router.core.prefix import NO_PREFIX, PromptPrefix
from stoker.router.core.replica import Replica

MAX_ADAPTERS = 4096  # whose replicas are remembered


class Route(msgspec.Struct, frozen=True):
    """What the decision about a request depends on."""

    model: str | None = None  # None: any replica serves it
    prefix: PromptPrefix = NO_PREFIX
    session: str = ""  # requests of one session prefer one replica
    adapter: str = ""
    tenant: str = ""


class Decision(msgspec.Struct, frozen=True):
    """The chosen replica, and the number of leading tokens of the prompt that it holds."""

    replica: Replica
    num_cached: int


class Policy(Protocol):
    """Chooses a replica."""

    def choose(self, route: Route, candidates: int) -> Decision:
        """Choose among `candidates`, a mask that is not 0."""

    def forget(self, slot: int) -> None:
        """The replica with this slot was removed."""


class PrefixPolicy:
    """The replica with the lowest cost: its load, plus the tokens of the prompt that it does not hold, minus bonuses.

    The cost is minimal over all candidates: replicas that hold the same number of blocks differ in their load only, so the least loaded
    one of each level is compared. Equal costs are decided by consistent hashing, so that several routers send a new prefix to the same
    replica.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._adapters: dict[str, int] = {}  # adapter → replicas that served it

    def choose(self, route: Route, candidates: int) -> Decision:
        fleet, prefix = self._fleet, route.prefix
        indexes = (fleet.stored.masks, fleet.recent.masks) if prefix.exact else ()
        levels = match_levels(prefix, (*indexes, fleet.assumed.masks), candidates)
        key = hash64(route.session) if route.session else prefix.hashes[0] if prefix.hashes else hash64(route.adapter)
        home = fleet.hashing.pick(candidates, key) if route.session else -1
        warm = self._adapters.get(route.adapter, 0) if route.adapter else 0
        lowest: int | None = None
        ties, num_blocks = 0, 0
        for level in levels:
            for mask, cost in self._costs(level, prefix, home, warm):
                if lowest is None or cost <= lowest:  # the last level holds most blocks
                    lowest, ties, num_blocks = cost, mask, level.num_blocks
        slot = home if home >= 0 and ties >> home & 1 else fleet.hashing.pick(ties, key)
        if route.adapter:
            self._remember(route.adapter, slot)
        return Decision(fleet.at(slot), num_blocks * prefix.tokens_per_block)

    def _costs(self, level: Level, prefix: PromptPrefix, home: int, warm: int) -> list[tuple[int, int]]:
        """(replicas, their cost) for the cheapest replicas of a level, of those with the adapter, and the home of the session."""
        settings, loads = self._fleet.settings, self._fleet.loads
        missing = prefix.num_tokens - level.num_blocks * prefix.tokens_per_block
        if home < 0 and not warm:
            load, least = loads.least(level.mask)
            return [(least, load + missing)]
        found = []
        for mask, bonus in ((level.mask & ~warm, 0), (level.mask & warm, settings.adapter_bonus)):
            if mask:
                load, least = loads.least(mask)
                found.append((least, load + missing - bonus))
                if home >= 0 and mask >> home & 1:
                    found.append((1 << home, loads.get(home) + missing - bonus - settings.session_bonus))
        return found

    def _remember(self, adapter: str, slot: int) -> None:
        """The replica has served the adapter from now on. The adapter that was added first is forgotten if there are too many."""
        if adapter not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
            del self._adapters[next(iter(self._adapters))]
        self._adapters[adapter] = self._adapters.get(adapter, 0) | 1 << slot

    def forget(self, slot: int) -> None:
        for adapter, mask in list(self._adapters.items()):
            if remaining := mask & ~(1 << slot):
                self._adapters[adapter] = remaining
            else:
                del self._adapters[adapter]


class LeastLoadedPolicy:
    """The least loaded replica; equal ones in turn."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._next = 0

    def choose(self, route: Route, candidates: int) -> Decision:
        slot = _next_of(self._fleet.loads.least(candidates)[1], self._next)
        self._next = slot + 1
        return Decision(self._fleet.at(slot), 0)

    def forget(self, slot: int) -> None:
        """Does nothing: no state belongs to one replica."""


class RoundRobinPolicy:
    """All replicas in turn."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._next = 0

    def choose(self, route: Route, candidates: int) -> Decision:
        slot = _next_of(candidates, self._next)
        self._next = slot + 1
        return Decision(self._fleet.at(slot), 0)

    def forget(self, slot: int) -> None:
        """Does nothing: no state belongs to one replica."""


POLICY_CLASSES: dict[str, Callable[[Fleet], Policy]] = {
    "prefix": PrefixPolicy,
    "least_loaded": LeastLoadedPolicy,
    "round_robin": RoundRobinPolicy,
}


def _next_of(mask: int, start: int) -> int:
    """The first slot of `mask` from `start` on, or else its first slot."""
    after = mask >> start << start
    chosen = after or mask
    return (chosen & -chosen).bit_length() - 1
