"""Consistent hashing: the same key selects the same replica in every router, and few keys move when replicas come and go."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from functools import lru_cache

POINTS = 64  # of each replica on the ring
_SMALL = 8


@lru_cache(1 << 16)
def hash64(text: str) -> int:
    """A 64-bit hash of a text that is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class ConsistentHash:
    """Replicas, by the hashes of their names, on a ring of 64-bit numbers. Sets of replicas are bit masks over their slots."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []  # (position, slot)
        self._names: dict[int, int] = {}  # slot → hash of the name

    def add(self, slot: int, name: str) -> None:
        """Add a replica."""
        self._names[slot] = hash64(name)
        for i in range(POINTS):
            insort(self._points, (hash64(f"{name}#{i}"), slot))

    def remove(self, slot: int) -> None:
        """Remove a replica."""
        self._names.pop(slot, None)
        self._points = [point for point in self._points if point[1] != slot]

    def pick(self, mask: int, key: int) -> int:
        """The slot of the replica in `mask`, which is not 0, that `key` selects."""
        count = mask.bit_count()
        if count == 1:
            return mask.bit_length() - 1
        if count <= _SMALL:  # few replicas can be far apart on a ring of many
            return self._highest(mask, key)
        points = self._points
        start = bisect_left(points, (key, -1))
        for i in range(len(points)):
            slot = points[(start + i) % len(points)][1]
            if mask >> slot & 1:
                return slot
        raise ValueError("the mask has replicas that are not on the ring")

    def _highest(self, mask: int, key: int) -> int:
        """The replica with the highest score, by rendezvous hashing."""
        best, slot = -1, -1
        while mask:
            bit = mask & -mask
            mask ^= bit
            candidate = bit.bit_length() - 1
            score = ((self._names[candidate] ^ key) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 16
            if score > best:
                best, slot = score, candidate
        return slot
