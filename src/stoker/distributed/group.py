"""The interface of a group of ranks, each of which holds a shard of one model."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.distributed.inbox import Inbox, Inboxes


class Group:
    """A group of ranks. This base class is the group of one rank, in which every collective is the identity."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    inboxes: Inboxes | None = None  # memory that the peers can write to; None: they cannot

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, with the same bits on every rank. May overwrite x."""
        return x

    def inbox(self, num_bytes: int) -> Inbox | None:
        """The inbox through which a kernel sums a tensor of `num_bytes` bytes. None: use `all_reduce`."""
        return None if self.inboxes is None else self.inboxes.select(num_bytes)

    def all_gather(self, x: Tensor) -> Tensor:
        """The x of all ranks, concatenated along the last axis, on every rank."""
        return x

    def gather_rows(self, x: Tensor) -> Tensor:
        """The x [T, ...] of all ranks, of the same shape on each, concatenated along the first axis: [size × T, ...] on every rank."""
        return x

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """Rows rank × T to (rank + 1) × T of the sum of x [size × T, ...] over the ranks: [T, ...]. May overwrite x."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """The x of rank 0, on every rank. May overwrite x."""
        return x

    def smallest(self, value: int) -> int:
        """The minimum of the values of all ranks, on every rank. Waits for all ranks."""
        return value


SINGLE = Group()
