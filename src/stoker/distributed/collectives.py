"""Groups over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.distributed.group import Group

LOOK = timedelta(seconds=0.5)  # how often one who waits on a CPU asks whether the others live


class ProcessGroup(Group):
    """Collectives of a torch process group. On a GPU they are queued on the current stream, and may be captured in a graph.

    On a CPU they end in this call. `check` raises when a rank has failed; it is asked meanwhile, since gloo does not always tell: where a
    rank asks for data and dies before it is sent, gloo's thread drops the send and who waits for it waits for the group's timeout (6 % of
    300 ranks that were killed amid all-reduces).
    """

    def __init__(self, inner: dist.ProcessGroup, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self.inner = inner
        self.device = device
        self.rank, self.size = inner.rank(), inner.size()
        self._check = check

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            x = x.contiguous()
            self._end(self.inner.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            self._end(self.inner.allgather([list(out.unbind(0))], [x]))
        return out.movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> Tensor:
        if x.numel():
            self._end(self.inner.broadcast([x], _FROM_FIRST))
        return x

    def smallest(self, value: int) -> int:
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._end(self.inner.allreduce([found], options))
        return int(found.item())

    def _end(self, work: dist.Work) -> None:
        if self.device.type != "cpu":
            work.wait()
            return
        while True:
            with contextlib.suppress(RuntimeError):  # not ended in time, or ended with an error: told apart below
                work.wait(LOOK)
                return
            if work.is_completed():
                work.wait()
                return
            try:
                self._check()
            except Exception:
                # gloo's thread goes on waiting, and the end of the group would wait for the thread: the group stays with the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.inner))
                raise


_FROM_FIRST = dist.BroadcastOptions()
_FROM_FIRST.rootRank, _FROM_FIRST.rootTensor = 0, 0
