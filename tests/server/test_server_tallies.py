"""Counts kept beside prometheus-client: what is written is what was counted, and nothing piles up between scrapes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from stoker.server.metrics.counters import Tallies


def test_counts_are_written_once() -> None:
    registry, tallies = CollectorRegistry(), Tallies(shared=False)
    counter = tallies.counter(Counter("tokens", "", registry=registry))
    histogram = tallies.histogram(Histogram("seconds", "", buckets=(1.0, 2.0), registry=registry))
    for amount in (0, 2, 0, 3):
        counter.inc(amount)
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    for _ in range(2):
        tallies.write()
        lines = generate_latest(registry).decode().splitlines()
        assert {"tokens_total 5.0", 'seconds_bucket{le="1.0"} 2.0', 'seconds_bucket{le="2.0"} 3.0', "seconds_count 4.0"} <= set(lines)
    assert counter.value == 5


def test_nothing_counted_is_nothing_kept() -> None:
    tallies = Tallies(shared=False)
    counter = tallies.counter(Counter("tokens", "", registry=CollectorRegistry()))
    for _ in range(100):
        counter.inc(0)
    assert not tallies._changed
