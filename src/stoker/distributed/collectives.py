"""Groups of torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.distributed.group import Finish, Group

# gloo's all-reduce and all-gather pass messages around a ring: 2 × (ranks - 1) or ranks - 1 messages one after the other. Up to this size,
# an all-to-all is faster with more than two ranks, because all its messages travel at once.
DIRECT_BYTES = 1 << 17
CHECK_INTERVAL = timedelta(seconds=0.5)  # between calls of `check` while a CPU waits


class ProcessGroup(Group):
    """Collectives of a torch process group. On a GPU they are queued on the current stream and may be captured in a CUDA graph.

    On a CPU they block. `check` is called while they wait and raises if a rank has failed, because gloo does not always report it: if a
    rank requests data and ends before the data is sent, gloo's thread drops the send, and the receiver waits for the timeout of the group
    (this happened for 6 % of 300 ranks that were killed during all-reduces).
    """

    def __init__(self, inner: dist.ProcessGroup, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self.inner = inner
        self.device = device
        self.rank, self.size = inner.rank(), inner.size()
        self._check = check

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks. May overwrite x."""
        x = x.contiguous()
        if self._is_direct(x):
            # Added in the order of the ranks, so that every rank gets the same bits.
            parts = self._collect(x)
            total = parts[0]
            for part in parts[1:]:
                total += part
            return total
        if x.numel():
            self._wait(self.inner.allreduce([x]))
        return x

    def begin_sum(self, x: Tensor) -> Finish:
        """Start an all-reduce of x. NCCL runs it on a stream of its own, gloo in a thread."""
        x = x.contiguous()
        work = self.inner.allreduce([x])

        def finish() -> tuple[Tensor, ...]:
            """Wait for the sum."""
            self._wait(work)
            return (x,)

        return finish

    def all_gather(self, x: Tensor) -> Tensor:
        """The x of all ranks, concatenated along the last axis."""
        return self._collect(x.contiguous()).movedim(0, -2).flatten(-2)

    def gather_rows(self, x: Tensor) -> Tensor:
        """The x [T, ...] of all ranks, concatenated along the first axis."""
        return self._collect(x.contiguous()).flatten(0, 1)

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """This rank's part [T, ...] of the sum of x [size × T, ...] over the ranks. gloo has no such collective, and sums all parts."""
        parts = list(x.contiguous().chunk(self.size))
        if self.device.type == "cpu":
            return self.all_reduce(x).chunk(self.size)[self.rank]
        out = torch.empty_like(parts[0])
        if x.numel():
            self._wait(self.inner.reduce_scatter([out], [parts]))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """The x of rank 0. Overwrites x."""
        if x.numel():
            self._wait(self.inner.broadcast([x], _FROM_FIRST))
        return x

    def smallest(self, value: int) -> int:
        """The minimum of the values of all ranks."""
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait(self.inner.allreduce([found], options))
        return int(found.item())

    def _is_direct(self, x: Tensor) -> bool:
        """Whether each rank sends its x to each other rank, instead of around a ring."""
        return self.device.type == "cpu" and self.size > 2 and 0 < x.nbytes <= DIRECT_BYTES

    def _collect(self, x: Tensor) -> Tensor:
        """The contiguous x of all ranks: [size, *x.shape]."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if self._is_direct(x):
            copies = x.expand(self.size, *x.shape).contiguous()
            self._wait(self.inner.alltoall_base(out, copies, [], [], dist.AllToAllOptions()))
        elif x.numel():
            self._wait(self.inner.allgather([list(out.unbind(0))], [x]))
        return out

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective: on a GPU in the current stream, on a CPU in this thread. Raises an error if a rank has failed."""
        if self.device.type != "cpu":
            work.wait()
            return
        while True:
            with contextlib.suppress(RuntimeError):  # not complete in time, or failed: distinguished below
                work.wait(CHECK_INTERVAL)
                return
            if work.is_completed():
                work.wait()
                return
            try:
                self._check()
            except Exception:
                keep_group(self.inner)
                raise


def keep_group(inner: dist.ProcessGroup) -> None:
    """Keep a group as long as the process: a thread of gloo keeps waiting in it, and destroying it would wait for the thread."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


_FROM_FIRST = dist.BroadcastOptions()
_FROM_FIRST.rootRank, _FROM_FIRST.rootTensor = 0, 0
