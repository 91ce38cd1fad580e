"""Reads byte ranges of open files into memory; a short read is an error."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def read_into(fd: int, out: memoryview, start: int) -> None:
    """Fill `out` with the bytes of an open file from offset `start`. Raises EOFError when the file ends first."""
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], start + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {start + done}")
        done += count


def as_bytes(tensor: Tensor) -> memoryview:
    """A view of the bytes of a contiguous CPU tensor, without a copy. It is writable."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
