"""The replicas of a router: their slots, which of them may get requests, their loads, and the blocks that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.router.core.block_index import BlockIndex, PredictedIndex
from stoker.router.core.breaker import Breaker
from stoker.router.core.consistent_hash import ConsistentHash
from stoker.router.core.load_table import LoadTable
from stoker.router.core.replica import Replica, ReplicaState
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.transfer.address import TransferAddress

RECENT_S = 10.0  # a block that a prompt creates is assumed to exist for this time, until events report it
MAX_PREDICTED_BLOCKS = 1 << 18
NEVER_S = float("inf")


class Fleet:
    """Masks are sets of slots. `refresh` updates the masks and the load of a replica after any change of its state."""

    def __init__(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self.hashing = ConsistentHash()
        self.loads = LoadTable()
        self.stored = BlockIndex()  # from block events
        self.recent = PredictedIndex(RECENT_S, MAX_PREDICTED_BLOCKS)  # prompts sent to replicas that publish events
        self.assumed = PredictedIndex(NEVER_S, MAX_PREDICTED_BLOCKS)  # prompts of which no replica reports the blocks
        self.all = 0
        self.available = 0
        self.full = 0  # replicas with max_in_flight requests
        self.prefill_only = 0  # replicas that compute prompts for others
        self.exporting = 0  # those, and others that also do so
        self._replicas: dict[int, Replica] = {}
        self._slots: dict[str, int] = {}
        self._serving: dict[str, int] = {}  # model → replicas

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def get(self, name: str) -> Replica | None:
        """The replica with this name, or None."""
        slot = self._slots.get(name)
        return None if slot is None else self._replicas[slot]

    def at(self, slot: int) -> Replica:
        """The replica with this slot."""
        return self._replicas[slot]

    def serving(self, model: str | None) -> int:
        """The replicas that serve a model; all for None, and for a model that none serves."""
        return self.all if model is None else self._serving.get(model, self.all)

    def models(self) -> list[str]:
        """The names of all models that replicas serve, in alphabetical order."""
        return sorted(self._serving)

    def add(self, name: str) -> Replica:
        """Add a replica, which gets requests once its health is READY. Raises ValueError if there is one with this name."""
        if name in self._slots:
            raise ValueError(f"there is a replica {name!r} already")
        slot = next(slot for slot in range(len(self._replicas) + 1) if slot not in self._replicas)
        replica = self._replicas[slot] = Replica(name, slot, Breaker(self.settings.max_failures))
        self._slots[name] = slot
        if self.settings.max_in_flight is not None:
            replica.max_in_flight = self.settings.max_in_flight
        self.all |= 1 << slot
        self.hashing.add(slot, name)
        self.refresh(replica, 0.0)
        return replica

    def remove(self, replica: Replica) -> None:
        """Remove a replica. Its requests in flight continue."""
        self.forget_blocks(replica)
        self.set_models(replica, ())
        self.loads.remove(replica.slot)
        self.hashing.remove(replica.slot)
        for mask in ("all", "available", "full", "prefill_only", "exporting"):
            setattr(self, mask, getattr(self, mask) & ~(1 << replica.slot))
        del self._replicas[replica.slot], self._slots[replica.name]

    def set_models(self, replica: Replica, models: Iterable[str]) -> None:
        """The replica serves these models from now on."""
        bit, wanted = 1 << replica.slot, frozenset(models)
        for model in replica.models - wanted:
            self._serving[model] &= ~bit
            if not self._serving[model]:
                del self._serving[model]
        for model in wanted:
            self._serving[model] = self._serving.get(model, 0) | bit
        replica.models = wanted

    def set_transfer(self, replica: Replica, transfer: TransferAddress | None) -> None:
        """The role of the replica, and the address from which others read its blocks."""
        bit, role = 1 << replica.slot, transfer.role if transfer is not None else ""
        self.prefill_only = self.prefill_only | bit if role == "prefill" else self.prefill_only & ~bit
        self.exporting = self.exporting | bit if role in ("prefill", "both") else self.exporting & ~bit
        replica.transfer = transfer

    def set_health(self, replica: Replica, health: ReplicaState, now_s: float, reason: str = "") -> None:
        """Set the result of a health check. A replica that is unreachable may have been restarted, and holds no blocks then."""
        if health is ReplicaState.UNREACHABLE and replica.health is not ReplicaState.UNREACHABLE:
            self.forget_blocks(replica)
        replica.health, replica.reason = health, reason
        if health is ReplicaState.READY:
            replica.ready_s = now_s
        self.refresh(replica, now_s)

    def forget_blocks(self, replica: Replica) -> None:
        """The replica holds no blocks any more."""
        self.stored.clear(replica.slot)
        self.recent.clear(replica.slot)
        self.assumed.clear(replica.slot)

    def contains(self, replica: Replica) -> bool:
        """Whether the replica is still part of the fleet."""
        return self._replicas.get(replica.slot) is replica

    def refresh(self, replica: Replica, now_s: float) -> None:
        """Update the masks and the load after a change of the replica's state. Does nothing if it was removed."""
        if not self.contains(replica):
            return
        bit = 1 << replica.slot
        self.available = self.available | bit if replica.is_available(now_s) else self.available & ~bit
        self.full = self.full | bit if replica.num_in_flight >= replica.max_in_flight else self.full & ~bit
        self.loads.set(replica.slot, replica.load(self.settings.decode_cost))

    def refresh_load(self, replica: Replica, now_s: float) -> None:
        """`refresh` after a request has begun or ended, or has received its first token, faster."""
        if not replica.breaker.is_closed or replica.max_in_flight - replica.num_in_flight < 2:
            self.refresh(replica, now_s)
        elif self._replicas.get(replica.slot) is replica:
            self.loads.set(replica.slot, replica.load(self.settings.decode_cost))

    def refresh_all(self, now_s: float) -> None:
        """Update all masks, because time has passed: pauses of circuit breakers end."""
        for replica in self:
            self.refresh(replica, now_s)
        self.recent.expire(now_s)
