"""A group of ranks that hold one model together. A rank knows its world, not how it was started."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.distributed.inbox import Inbox, Inboxes


class Group:
    """The group of one: every collective is the identity."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    inboxes: Inboxes | None = None  # where ranks write into each other's memory; None: they cannot

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, on every rank, bit for bit the same. May overwrite x."""
        return x

    def inbox(self, num_bytes: int) -> Inbox | None:
        """Through which a kernel sums a message of `num_bytes` by itself; None: `all_reduce` does."""
        return None if self.inboxes is None else self.inboxes.suited(num_bytes)

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
