"""From files to a device through pinned memory: pageable memory is copied at a sixth of the bus's rate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from stoker.engine.tensor_file import as_bytes, read_into

STAGING_BYTES = 32 << 20
READERS = 4  # one thread copies out of the page cache at 5 to 10 GB/s; several keep ahead of the bus


class Staging:
    """Fills memory of a device from files, for one thread, through two buffers: one is filled while the other is on the bus."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._readers = ThreadPoolExecutor(READERS)
        self._turn = 0

    def fill(self, out: Tensor, fd: int, start: int) -> None:
        """Fill `out`, contiguous on a device, with an open file's bytes from `start` on. Raises EOFError when the file ends first."""
        flat = out.view(-1).view(torch.uint8)
        for at in range(0, flat.numel(), STAGING_BYTES):
            part = flat[at : at + STAGING_BYTES]
            buffer, sent = self._buffers[self._turn], self._sent[self._turn]
            self._turn ^= 1
            sent.synchronize()
            self._read(buffer[: part.numel()], fd, start + at)
            part.copy_(buffer[: part.numel()], non_blocking=True)
            sent.record()

    def _read(self, buffer: Tensor, fd: int, start: int) -> None:
        view, share = as_bytes(buffer), -(-buffer.numel() // READERS)
        jobs = [self._readers.submit(read_into, fd, view[a : a + share], start + a) for a in range(0, len(view), share)]
        for job in jobs:
            job.result()
