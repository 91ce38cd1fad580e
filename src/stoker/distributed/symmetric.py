"""All-reduces through peer memory: GPUs write to the memory of their peers over NVLink, without NCCL.

Messages up to 4 MiB (of two ranks, 16 MiB) use inboxes (`distributed.inbox`), whose kernel also adds the residual; messages up to 16 MiB
of more ranks use the symmetric-memory kernels of PyTorch; larger ones use NCCL. All of them can be captured in a CUDA graph and give every
rank the same bits. NVLink multicast is not used. Sums beside other kernels are copies between two ranks (`distributed.peer_copies`), and
NCCL among more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from stoker.distributed.collectives import ProcessGroup
from stoker.distributed.group import Finish
from stoker.distributed.inbox import EMPTY, ONE_SHOT_BYTES, Inboxes, memory_bytes
from stoker.distributed.peer_copies import MAX_BYTES as MAX_COPIED_BYTES
from stoker.distributed.peer_copies import NUM_SLOTS, PeerCopies

# Larger messages of long prefills use NCCL. For 16 MiB on four H200, including the residual and the norm: 116 µs, NCCL 122 µs.
MAX_BYTES = 16 << 20
SLOT_ALIGNMENT = 512
_DTYPES = (torch.bfloat16, torch.float32)  # of PyTorch's kernels


class SymmetricGroup(ProcessGroup):
    """NCCL collectives, and all-reduces through peer memory where these are faster.

    A process has one such group in its lifetime: PyTorch numbers the messages of `rendezvous` and remembers the stores of groups per
    process, so that the next group of a leader, whose other ranks are new processes, would wait for messages that are not sent.
    """

    _was_created = False

    def __init__(self, inner: dist.ProcessGroup, device: torch.device) -> None:
        """Allocate peer memory.

        Raises RuntimeError, on every rank, if the devices cannot access each other's memory or if a rank had such a group before.
        """
        super().__init__(inner, device)
        if not self._can_access_all():
            raise RuntimeError("not every device can access the memory of all others")
        if not self.smallest(not SymmetricGroup._was_created):
            raise RuntimeError("the process of a rank has run an engine on several GPUs before. Load each one in a process of its own")
        SymmetricGroup._was_created = True
        self._name = inner.group_name
        self._buffer, _, _ = self._allocate(MAX_BYTES)
        self._copies: PeerCopies | None = None
        if self.size in ONE_SHOT_BYTES:
            self._memory, _, bases = self._allocate(memory_bytes(self.size))
            self._memory.fill_(EMPTY)
            torch.cuda.synchronize(device)
            self.smallest(0)  # wait until the inboxes of all ranks are initialized
            self.inboxes = Inboxes(bases, self.rank, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, through peer memory for up to MAX_BYTES, else by NCCL. May overwrite x."""
        num_bytes = x.numel() * x.element_size()
        # PyTorch's kernel reads 16 bytes at a time from the slice of each rank.
        if x.dtype not in _DTYPES or not 0 < num_bytes <= MAX_BYTES or num_bytes % (16 * self.size):
            return super().all_reduce(x)
        x = x.contiguous()
        shared = self._buffer.view(x.dtype)[: x.numel()].view(x.shape)
        shared.copy_(x)
        result: Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)
        return result

    def reserve(self, num_bytes: int) -> None:
        """Allocate the memory to which the ranks copy summands, for two ranks."""
        if self.size == 2 and self._copies is None:
            slot_bytes = -(-min(num_bytes, MAX_COPIED_BYTES) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            self._slots, handle, _ = self._allocate(NUM_SLOTS * slot_bytes)
            self._copies = PeerCopies(handle, self.rank, slot_bytes, torch.cuda.Stream(self.device, priority=-1))

    def begin_sum(self, x: Tensor) -> Finish:
        """Start to copy x to the other rank; messages for which no memory is reserved use NCCL."""
        if self._copies is None or x.nbytes > self._copies.slot_bytes:
            return super().begin_sum(x)
        return self._copies.begin(x.contiguous())

    def _allocate(self, num_bytes: int) -> tuple[Tensor, Any, list[int]]:
        """Allocate int32 memory on every rank.

        Returns (this rank's tensor, PyTorch's handle of the memory of all ranks, the address of each rank's memory in this process).
        """
        memory = symmetric_memory.empty(num_bytes // 4, dtype=torch.int32, device=self.device)
        handle = symmetric_memory.rendezvous(memory, self._name)
        bases = [int(base) for base in handle.buffer_ptrs]
        if bases[self.rank] != memory.data_ptr():
            raise RuntimeError("the address of symmetric memory differs from that of its tensor")
        return memory, handle, bases

    def _can_access_all(self) -> bool:
        """Whether every device can access the memory of all others. Waits for all ranks."""
        index = torch.tensor([self.device.index], device=self.device)
        others = [other for other in self.all_gather(index).tolist() if other != self.device.index]
        return bool(self.smallest(all(torch.cuda.can_device_access_peer(self.device, other) for other in others)))
