"""The metrics of the router, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily

from stoker.base.metrics import LATENCY_S
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Router

DECISION_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 60.0)


class RouterMetrics:
    """Counters of the requests, and at each scrape the state of the replicas."""

    def __init__(self, router: Router) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise each counter gets a gauge with its creation time
        self._registry = registry = CollectorRegistry()
        self.responses = Counter("stoker_router_responses_total", "Responses to clients by status.", ("status",), registry=registry)
        self.attempts = Counter(
            "stoker_router_attempts_total", "Requests to replicas by outcome: ok, failed, busy, cancelled.", ("replica", "outcome"),
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("stoker_router_prompt_tokens_total", "Prompt tokens of routed requests.", registry=registry)
        self.cached_tokens = Counter(
            "stoker_router_cached_tokens_total", "Prompt tokens that the chosen replicas were expected to hold.", registry=registry
        )
        self.prefills = Counter(
            "stoker_router_prefills_total", "Prompts that another replica computes, by outcome: ok, failed, cancelled.",
            ("replica", "outcome"), registry=registry,
        )  # fmt: skip
        self.choice = Histogram(
            "stoker_router_choice_seconds", "Time to tokenize a request, choose its replica and wait for room.", registry=registry,
            buckets=DECISION_S,
        )  # fmt: skip
        self.first_byte = Histogram(
            "stoker_router_first_byte_seconds", "Time from a request's arrival to the first byte of its response.", registry=registry,
            buckets=LATENCY_S,
        )  # fmt: skip
        registry.register(_Replicas(router))

    def exposition(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self._registry)


class _Replicas:
    """A collector of the state of the replicas."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[MetricFamily]:
        """One sample per replica and metric."""
        fleet = self._router.fleet
        yield GaugeMetricFamily("stoker_router_waiting_requests", "Requests that wait for room.", self._router.num_waiting)
        rows = (
            ("ready", "1 if the replica's health check succeeds.", lambda r: r.health is ReplicaState.READY),
            ("draining", "1 if the replica gets no new requests.", lambda r: r.draining),
            ("circuit_open", "1 if the replica is paused after failures.", lambda r: not r.breaker.is_closed),
            ("requests_in_flight", "Requests of this router on the replica.", lambda r: r.num_in_flight),
            ("load_tokens", "Load of the replica, in tokens of prefill.", lambda r: fleet.loads.get(r.slot)),
            ("known_blocks", "KV cache blocks that the replica has reported.", lambda r: fleet.stored.num_blocks(r.slot)),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(f"stoker_router_replica_{name}", text, labels=("replica",))
            for replica in fleet:
                family.add_metric([replica.name], float(value(replica)))
            yield family
