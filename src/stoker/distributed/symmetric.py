"""GPUs that write into each other's memory over NVLink, without NCCL's protocol, for the all-reduces of decode steps.

Up to 4 MiB a message goes through inboxes (`distributed.inbox`), whose kernel adds the residual. Up to 16 MiB it goes through PyTorch's
symmetric-memory kernels, larger ones through NCCL. All may be captured in a graph, all give every rank the same bits. NVLink multicast
is not used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.inbox import EMPTY, ONE_SHOT_BYTES, Inboxes, memory_bytes

# Larger messages, of long prefills, are NCCL's: of 16 MiB on four H200s, 116 µs with the add and the norm against NCCL's 122.
MAX_BYTES = 16 << 20
_DTYPES = (torch.bfloat16, torch.float32)  # that PyTorch's kernels sum


class SymmetricGroup(ProcessGroup):
    """NCCL, and peers' memory for the all-reduces that it serves better."""

    def __init__(self, inner: dist.ProcessGroup, device: torch.device) -> None:
        """Raises RuntimeError where the devices cannot reach each other's memory; every rank then does."""
        super().__init__(inner, device)
        if not self._reaches_all():
            raise RuntimeError("not every device can reach the others' memory")
        self._name = inner.group_name
        self._buffer, _ = self._shared(MAX_BYTES)
        if self.size in ONE_SHOT_BYTES:
            self._memory, bases = self._shared(memory_bytes(self.size))
            self._memory.fill_(EMPTY)
            torch.cuda.synchronize(device)
            self.smallest(0)  # all inboxes are empty: the first message may come
            self.inboxes = Inboxes(bases, self.rank, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        num_bytes = x.numel() * x.element_size()
        # Its kernel reads 16 bytes at a time, of each rank's share.
        if x.dtype not in _DTYPES or not 0 < num_bytes <= MAX_BYTES or num_bytes % (16 * self.size):
            return super().all_reduce(x)
        x = x.contiguous()
        shared = self._buffer.view(x.dtype)[: x.numel()].view(x.shape)
        shared.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)

    def _shared(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """int32 memory of this rank, and where each rank's is from here."""
        memory = symmetric_memory.empty(num_bytes // 4, dtype=torch.int32, device=self.device)
        handle = symmetric_memory.rendezvous(memory, self._name)
        bases = [int(base) for base in handle.buffer_ptrs]
        if bases[self.rank] != memory.data_ptr():
            raise RuntimeError("symmetric memory begins elsewhere than its tensor")
        return memory, bases

    def _reaches_all(self) -> bool:
        index = torch.tensor([self.device.index], device=self.device)
        others = [other for other in self.all_gather(index).tolist() if other != self.device.index]
        return bool(self.smallest(all(torch.cuda.can_device_access_peer(self.device, other) for other in others)))
