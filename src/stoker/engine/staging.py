"""Copies file contents to a device through pinned staging buffers. Copies from pageable memory reach a sixth of the bus bandwidth."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from stoker.engine.byte_io import as_bytes, read_into

STAGING_BYTES = 32 << 20  # of one buffer
READERS = 4  # one thread copies 5 to 10 GB/s out of the page cache, which is less than the bus can transfer


class StagingBuffers:
    """Two pinned buffers, of which one is filled from a file while the other is copied to the device. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._readers = ThreadPoolExecutor(READERS)
        self._next = 0

    def copy_from_file(self, out: Tensor, fd: int, start: int) -> None:
        """Fill `out`, a contiguous device tensor, with the bytes of an open file from offset `start`.

        Raises EOFError when the file ends first.
        """
        flat = out.view(-1).view(torch.uint8)
        for at in range(0, flat.numel(), STAGING_BYTES):
            part = flat[at : at + STAGING_BYTES]
            buffer, copied = self._buffers[self._next], self._copied[self._next]
            self._next ^= 1
            copied.synchronize()
            self._read(buffer[: part.numel()], fd, start + at)
            part.copy_(buffer[: part.numel()], non_blocking=True)
            copied.record()

    def _read(self, buffer: Tensor, fd: int, start: int) -> None:
        """Fill a buffer from the file, with several threads."""
        view, step = as_bytes(buffer), -(-buffer.numel() // READERS)
        jobs = [self._readers.submit(read_into, fd, view[at : at + step], start + at) for at in range(0, len(view), step)]
        for job in jobs:
            job.result()
