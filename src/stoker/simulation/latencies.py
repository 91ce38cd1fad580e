"""Latencies between tokens, counted in classes whose bounds differ by 0.05 %: a long simulation has too many to list them."""

from __future__ import annotations

import math

CLASSES = 2000.0  # per factor of e


class Latencies:
    """A distribution of times in seconds. Sum, number, minimum and maximum are exact; percentiles are exact to 0.025 %."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.min_s, self.max_s = math.inf, 0.0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, count: int) -> None:
        """Add a time `count` times."""
        self._add(seconds, count, math.floor(math.log(seconds) * CLASSES))

    def add_series(self, first_s: float, difference_s: float, num_times: int, count: int) -> None:
        """Add an arithmetic series of `num_times` times, each `count` times."""
        if num_times == 1:
            self.add(first_s, count)
            return
        last_s = first_s + (num_times - 1) * difference_s
        key = math.floor(math.log(first_s) * CLASSES)
        if key < math.floor(math.log(last_s) * CLASSES):
            for i in range(num_times):
                self.add(first_s + i * difference_s, count)
        else:
            self._add((first_s + last_s) / 2, num_times * count, key)
            self.min_s, self.max_s = min(first_s, self.min_s), max(last_s, self.max_s)

    def _add(self, seconds: float, count: int, key: int) -> None:
        """Add a time, which belongs to the class `key`, `count` times."""
        self.count += count
        self.total_s += seconds * count
        if seconds < self.min_s:
            self.min_s = seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self._counts[key] = self._counts.get(key, 0) + count

    def merge(self, other: Latencies) -> None:
        """Add all times of another distribution."""
        self.count += other.count
        self.total_s += other.total_s
        self.min_s, self.max_s = min(self.min_s, other.min_s), max(self.max_s, other.max_s)
        for key, count in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + count

    def percentile(self, percent: float) -> float:
        """The time in seconds that `percent` of the times do not exceed, by the nearest rank. Raises ValueError if there are none."""
        rank = max(1, math.ceil(self.count * percent / 100))
        for key in sorted(self._counts):
            rank -= self._counts[key]
            if rank <= 0:
                return min(max(math.exp((key + 0.5) / CLASSES), self.min_s), self.max_s)
        raise ValueError("a percentile of no times")
