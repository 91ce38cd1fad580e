"""Sums of large messages over two ranks by copies between their memories, which no SM computes: other kernels keep all SMs meanwhile.

Each rank copies its summand to a slot in the memory of its peer. A copy engine does this, on a stream of its own, and a signal follows the
copy. The peer waits for the signal and adds both summands (`ops.add_summands`). All-reduces of NCCL occupy SMs instead, for which a
product on the same device waits: a persistent GEMM ends later by as much as its last CTA starts later.

    rank 0   stream of kernels   ... product n | product n+1          | wait n | add n | ...
             stream of copies                  | copy n, signal n     | copy n+1, signal n+1
    rank 1   the same at the same time

No barrier protects a slot from being overwritten, because `Group.begin_sum` limits the order. A rank copies summand n + 4 to the slot of
n after it has received signal n + 2. Its peer sent this one after the kernels that read slot n, which were launched before sum n + 2 began.
With three slots, the copy would only follow signal n + 1, which may be sent before slot n is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.distributed.group import Finish

NUM_SLOTS = 4
MAX_BYTES = 128 << 20  # of a slot: half of the rows of a step of 16,384 tokens with 8,192 features


class PeerCopies:
    """The slots of two ranks, in symmetric memory of NUM_SLOTS × slot_bytes bytes on each."""

    def __init__(self, handle: Any, rank: int, slot_bytes: int, stream: torch.cuda.Stream) -> None:
        """`handle`: PyTorch's, of the memory of both ranks. `stream`: for copies."""
        self.slot_bytes = slot_bytes
        self._handle, self._rank, self._stream = handle, rank, stream
        self._turn = 0

    def begin(self, x: Tensor) -> Finish:
        """Start to copy the contiguous x to the peer (`Group.begin_sum`)."""
        handle, rank, peer, slot = self._handle, self._rank, 1 - self._rank, self._turn
        self._turn = (slot + 1) % NUM_SLOTS
        place = tuple(x.shape), x.dtype, slot * self.slot_bytes // x.element_size()
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            handle.get_buffer(peer, *place).copy_(x)
            copied = self._stream.record_event()
            handle.put_signal(peer, slot)

        def finish() -> tuple[Tensor, ...]:
            """Wait for the copies in both directions."""
            torch.cuda.current_stream(x.device).wait_event(copied)  # x may be freed, and a later kernel may use its memory
            handle.wait_signal(peer, slot)
            return x, handle.get_buffer(rank, *place)

        return finish
