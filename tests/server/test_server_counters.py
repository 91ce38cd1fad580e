"""CounterBuffer writes each count to prometheus-client once, and does not record increments of 0."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from stoker.server.metrics.counters import CounterBuffer


def test_counts_are_written_once() -> None:
    registry, buffer = CollectorRegistry(), CounterBuffer(shared=False)
    counter = buffer.counter(Counter("tokens", "", registry=registry))
    histogram = buffer.histogram(Histogram("seconds", "", buckets=(1.0, 2.0), registry=registry))
    for amount in (0, 2, 0, 3):
        counter.inc(amount)
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    for _ in range(2):
        buffer.write()
        lines = generate_latest(registry).decode().splitlines()
        assert {"tokens_total 5.0", 'seconds_bucket{le="1.0"} 2.0', 'seconds_bucket{le="2.0"} 3.0', "seconds_count 4.0"} <= set(lines)
    assert counter.value == 5


def test_zero_increments_are_not_recorded() -> None:
    buffer = CounterBuffer(shared=False)
    counter = buffer.counter(Counter("tokens", "", registry=CollectorRegistry()))
    for _ in range(100):
        counter.inc(0)
    assert not buffer._changed
