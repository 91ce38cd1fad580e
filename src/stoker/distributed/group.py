"""A group of ranks that hold one model together. A rank knows its world, not how it was started."""

from __future__ import annotations

from torch import Tensor


class Group:
    """The group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, on every rank, bit for bit the same. May overwrite x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x joined along the last axis, on every rank."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank. May overwrite x."""
        return x

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank. Waits for all of them."""
        return value


SINGLE = Group()
