"""Settings of the routing decision."""

from __future__ import annotations

import msgspec

from stoker.base.config import check_range
from stoker.base.errors import ConfigError


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas are chosen. Costs are in tokens of prefill."""

    policy: str = "prefix"
    """`prefix`: the replica with the lowest cost, which is its load plus the tokens of the prompt that it does not hold. `least_loaded` and
    `round_robin` ignore prefixes, sessions and adapters."""

    decode_cost: int = 64
    """Load that a request in its decode phase adds to its replica."""

    session_bonus: int = 1024
    """Cost by which the replica of a session is preferred."""

    adapter_bonus: int = 1024
    """Cost by which replicas are preferred that served the adapter of the request before."""

    max_in_flight: int | None = None
    """Requests of this router on one replica; further ones wait in the router. None: twice the max_batch_size that the replica reports."""

    max_queue_size: int = 4096
    """Requests that wait in the router. Further ones are refused with status 429."""

    queue_timeout_s: float = 60.0
    """Seconds after which a request that still waits in the router is refused with status 503."""

    unavailable_timeout_s: float = 0.0
    """Seconds that a request waits while no replica is available, such as when the only one is restarted. 0: it is refused at once."""

    max_retries: int = 2
    """Further replicas to which a request is sent if one fails before it has answered."""

    max_failures: int = 3
    """Failures in a row after which the circuit breaker of a replica opens."""

    disaggregate_tokens: int = 512
    """Prompt tokens that are not cached, from which on another replica computes a prompt and transfers its KV cache blocks. It applies to
    replicas with a transfer address. 0: replicas compute all prompts themselves."""

    max_prefill_load: int = 65536
    """Load of a prefill replica, in tokens, above which the prompt is computed by the replica that generates the answer."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r} is refused.", cure=f"Use one of: {', '.join(POLICIES)}.")
        for name in ("decode_cost", "session_bonus", "adapter_bonus"):
            check_range(name, getattr(self, name), 0, 1 << 20)
        if self.max_in_flight is not None:
            check_range("max_in_flight", self.max_in_flight, 1, 1 << 20)
        check_range("disaggregate_tokens", self.disaggregate_tokens, 0, 1 << 24)
        check_range("max_prefill_load", self.max_prefill_load, 0, 1 << 40)
        check_range("max_queue_size", self.max_queue_size, 0, 1 << 20)
        if not 0 <= self.unavailable_timeout_s <= 86400:
            raise ConfigError(f"unavailable_timeout_s={self.unavailable_timeout_s} is refused.", cure="Use seconds, from 0 to 86400.")
        check_range("max_retries", self.max_retries, 0, 100)
        check_range("max_failures", self.max_failures, 1, 1000)
        if not 0.001 <= self.queue_timeout_s <= 86400:
            raise ConfigError(f"queue_timeout_s={self.queue_timeout_s} is refused.", cure="Use seconds, from 0.001 to 86400.")


POLICIES = ("prefix", "least_loaded", "round_robin")
