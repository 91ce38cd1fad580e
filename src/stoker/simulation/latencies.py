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
        self.add_series(seconds, 0.0, 1, count)

    def add_series(self, first_s: float, difference_s: float, num_times: int, count: int) -> None:
        """Add an arithmetic series of `num_times` times, each `count` times."""
        key, last_s = math.floor(math.log(first_s) * CLASSES), first_s
        if num_times > 1:
            last_s += (num_times - 1) * difference_s
            if key < math.floor(math.log(last_s) * CLASSES):
                self._add_each([first_s + i * difference_s for i in range(num_times)], count)
                return
        self.count += num_times * count
        self.total_s += (first_s + last_s) / 2 * (num_times * count)
        if first_s < self.min_s:
            self.min_s = first_s
        if last_s > self.max_s:
            self.max_s = last_s
        self._counts[key] = self._counts.get(key, 0) + num_times * count

    def _add_each(self, times: list[float], count: int) -> None:
        """Add ascending times, each `count` times."""
        counts = self._counts
        for seconds in times:
            key = math.floor(math.log(seconds) * CLASSES)
            counts[key] = counts.get(key, 0) + count
            self.total_s += seconds * count
        self.count += len(times) * count
        self.min_s, self.max_s = min(times[0], self.min_s), max(times[-1], self.max_s)

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
