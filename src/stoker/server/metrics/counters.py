"""Buffered counters: plain numbers that are added to prometheus-client's counters together.

Each update of a prometheus-client counter takes a lock and several calls, and a request makes 26 of them.

Private API of prometheus-client: the attributes _value, _sum, _buckets and _upper_bounds of counters and histograms.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Any

WRITE_S = 0.25  # maximum age of the counts in files that other processes read


class CounterBuffer:
    """The counters that changed since the last `write`.

    With `shared`, other processes report the counts, so they are written WRITE_S after a change. Otherwise the caller writes them.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._changed: list[BufferedCounter | BufferedHistogram] = []

    def counter(self, child: Any) -> BufferedCounter:
        """A buffered counter that is written to `child`."""
        return BufferedCounter(child, self)

    def histogram(self, child: Any) -> BufferedHistogram:
        """A buffered histogram that is written to `child`."""
        return BufferedHistogram(child, self)

    def add_changed(self, counter: BufferedCounter | BufferedHistogram) -> None:
        """Note a counter that must be written. If other processes read the values, schedule `write`."""
        if self._shared and not self._changed:
            asyncio.get_running_loop().call_later(WRITE_S, self.write)
        self._changed.append(counter)

    def write(self) -> None:
        """Add all changes to prometheus-client's counters."""
        changed, self._changed = self._changed, []
        for counter in changed:
            counter.write()


class BufferedCounter:
    """A counter; `child` is prometheus-client's, with its label values."""

    __slots__ = ("_amount", "_buffer", "_child")

    def __init__(self, child: Any, buffer: CounterBuffer) -> None:
        self._child, self._buffer, self._amount = child, buffer, 0.0

    def inc(self, amount: float = 1) -> None:
        """Add `amount` to the buffered count."""
        if amount and not self._amount:
            self._buffer.add_changed(self)
        self._amount += amount

    @property
    def value(self) -> int:
        """The total count of this process, and of ended ones whose files it continues."""
        return int(self._child._value.get() + self._amount)

    def write(self) -> None:
        """Add the buffered amount to prometheus-client's counter."""
        amount, self._amount = self._amount, 0.0
        self._child.inc(amount)


class BufferedHistogram:
    """A histogram; `child` is prometheus-client's, with its label values."""

    __slots__ = ("_bounds", "_buckets", "_buffer", "_child", "_sum")

    def __init__(self, child: Any, buffer: CounterBuffer) -> None:
        self._child, self._buffer = child, buffer
        self._bounds = child._upper_bounds
        self._buckets: dict[int, int] = {}
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `value` to the buffered observations, `count` times."""
        if not self._buckets:
            self._buffer.add_changed(self)
        bucket = bisect_left(self._bounds, value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self._sum += value * count

    def write(self) -> None:
        """Add the buffered observations to prometheus-client's histogram."""
        buckets, self._buckets = self._buckets, {}
        total, self._sum = self._sum, 0.0
        for bucket, count in buckets.items():
            self._child._buckets[bucket].inc(count)
        self._child._sum.inc(total)
