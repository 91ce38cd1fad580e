"""The interface of a group of ranks, each of which holds a shard of one model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.distributed.inbox import Inbox, Inboxes

# Waits for a sum over the ranks, in the current stream or on a CPU in this thread. Returns its summands: one tensor, or two to be added.
Finish = Callable[[], tuple[Tensor, ...]]


class Group:
    """A group of ranks. This base class is the group of one rank, in which every collective is the identity."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    inboxes: Inboxes | None = None  # memory that the peers can write to; None: they cannot

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, with the same bits on every rank. May overwrite x."""
        return x

    def overlaps(self, num_bytes: int) -> bool:
        """Whether a message of `num_bytes` bytes takes so long to sum that other kernels should run meanwhile (`begin_sum`).

        Shorter ones are faster through an inbox.
        """
        return self.size > 1 and self.inbox(num_bytes) is None

    def reserve(self, num_bytes: int) -> None:
        """Prepare for messages of up to `num_bytes` bytes in `begin_sum`. Every rank calls it, once, before the first of them."""

    def begin_sum(self, x: Tensor) -> Finish:
        """Start to sum x over the ranks. Kernels that are launched before the returned function is called run at the same time.

        At most two sums may be unfinished. They are finished in the order in which they began, and the kernels that read the summands of
        one are launched before the second next one begins. x is overwritten or kept unchanged until then, and must not be used meanwhile.
        """
        total = self.all_reduce(x)
        return lambda: (total,)

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
