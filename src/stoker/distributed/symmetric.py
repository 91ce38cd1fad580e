"""All-reduce of decode-size messages over symmetric memory: every GPU reads its peers' buffers over NVLink, without NCCL's protocol.

One-shot: each rank reads all of every peer's message and sums it. Two-shot: each rank sums its share, then all read the shares. Both
are one kernel between two barriers, and may be captured in a graph; sums are in the order of the ranks, so every rank has the same
bits. Measured on H200s, in a graph, bfloat16, against NCCL: 2 ranks 7.2 and 12.6 µs at 64 KiB, 20.2 and 38.0 at 4 MiB; 4 ranks 8.9
and 16.1, 29.0 and 46.4. NVLink multicast is not used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from stoker.distributed.collectives import ProcessGroup

MAX_BYTES = 4 << 20  # larger messages, of long prefills, are NCCL's
# Up to so many bytes one-shot is the faster: reading everything from everyone grows with the ranks.
ONE_SHOT_BYTES = {2: 128 << 10, 4: 128 << 10, 8: 32 << 10}
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernels sum


class SymmetricGroup(ProcessGroup):
    """NCCL, and symmetric memory for the all-reduces that it serves better."""

    def __init__(self, inner: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(inner, device)
        self._name = inner.group_name
        self._buffer = symmetric_memory.empty(MAX_BYTES // 4, dtype=torch.float32, device=device)
        symmetric_memory.rendezvous(self._buffer, self._name)
        self._one_shot_bytes = ONE_SHOT_BYTES.get(self.size, 32 << 10)

    def all_reduce(self, x: Tensor) -> Tensor:
        how = method(x.numel() * x.element_size(), x.dtype, self.size, self._one_shot_bytes)
        if how == "nccl":
            return super().all_reduce(x)
        x = x.contiguous()
        shared = self._buffer.view(x.dtype)[: x.numel()].view(x.shape)
        if how == "one-shot":
            return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self._name)
        shared.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, x)


def method(num_bytes: int, dtype: torch.dtype, size: int, one_shot_bytes: int) -> str:
    """one-shot, two-shot or nccl: how a message is summed. The kernels read 16 bytes at a time, and two-shot a share of them a rank."""
    if dtype not in _DTYPES or not 0 < num_bytes <= MAX_BYTES or num_bytes % 16:
        return "nccl"
    if num_bytes <= one_shot_bytes:
        return "one-shot"
    return "two-shot" if num_bytes % (16 * size) == 0 else "nccl"
