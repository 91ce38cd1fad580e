"""Groups over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.distributed.group import Group


class ProcessGroup(Group):
    """Collectives of a torch process group. On a GPU they are queued on the current stream, and may be captured in a graph."""

    def __init__(self, inner: dist.ProcessGroup, device: torch.device) -> None:
        self.inner = inner
        self.device = device
        self.rank, self.size = inner.rank(), inner.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            x = x.contiguous()
            self.inner.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            self.inner.allgather([list(out.unbind(0))], [x]).wait()
        return out.movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> Tensor:
        if x.numel():
            self.inner.broadcast([x], _FROM_FIRST).wait()
        return x

    def smallest(self, value: int) -> int:
        found = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self.inner.allreduce([found], options).wait()
        return int(found.item())


_FROM_FIRST = dist.BroadcastOptions()
_FROM_FIRST.rootRank, _FROM_FIRST.rootTensor = 0, 0
