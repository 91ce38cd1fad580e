"""One replica as the router sees it."""

from __future__ import annotations

import enum

from stoker.router.core.breaker import Breaker
from stoker.runtime.transfer.address import TransferAddress


class ReplicaState(enum.StrEnum):
    """What the health checks of a replica found."""

    UNKNOWN = "unknown"  # not checked yet
    READY = "ready"
    NOT_READY = "not ready"  # it answers, but serves no model
    UNREACHABLE = "unreachable"


class Replica:
    """The state of one replica. `Fleet` changes it, and keeps its masks and loads consistent with it."""

    def __init__(self, name: str, slot: int, breaker: Breaker) -> None:
        self.name = name  # its URL
        self.slot = slot  # bit in masks
        self.breaker = breaker
        self.health = ReplicaState.UNKNOWN
        self.reason = ""  # of a health other than READY
        self.ready_s = float("-inf")  # time of the last health check that found it ready
        self.draining = False  # gets no new requests
        self.models: frozenset[str] = frozenset()  # that it serves
        self.publishes_events = False
        self.transfer: TransferAddress | None = None  # of KV cache blocks, and its role
        self.tokens_per_block = 0
        self.max_in_flight = 1 << 20  # requests of this router
        self.num_in_flight = 0  # requests of this router
        self.num_others = 0  # requests of other clients and routers, at the last health check
        self.prefill_tokens = 0  # of requests of this router that have no token yet, without those in its cache
        self.num_requests = 0  # sent since the start

    def load(self, decode_cost: int) -> int:
        """The load in tokens of prefill."""
        return self.prefill_tokens + decode_cost * (self.num_in_flight + self.num_others)

    def is_available(self, now_s: float) -> bool:
        """Whether it may get new requests, if it has room."""
        return self.health is ReplicaState.READY and not self.draining and self.breaker.allows(now_s)
