"""Numbers on their way between the host and a device, with nobody waiting for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_LEAST = 1 << 16  # bytes: buffers grow seldom, for pinning memory stops the device
ALIGN = 16  # bytes: kernels are compiled for aligned arguments


class StagingBuffers:
    """Buffers that steps are copied to the device from: pinned for a GPU, and used again when the step that one was for has ended.

    A step takes one at most.
    """

    def __init__(self, device: torch.device, num_in_flight: int = 2) -> None:
        self.device = device
        self._ring = [torch.empty(0, dtype=torch.uint8)] * (num_in_flight + 2)
        self._turn = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], of no particular value."""
        if self.device.type != "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8)
        self._turn = (self._turn + 1) % len(self._ring)
        if self._ring[self._turn].numel() < num_bytes:
            self._ring[self._turn] = torch.empty(2 * max(num_bytes, _LEAST), dtype=torch.uint8, pin_memory=True)
        return self._ring[self._turn][:num_bytes]

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays on the device, in one copy."""
        starts = [0, *itertools.accumulate(padded(array.nbytes) for array in arrays)]
        host = self.take(starts[-1])
        for array, start in zip(arrays, starts, strict=False):
            host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device = host.to(self.device, non_blocking=True) if arrays else host
        return [
            device[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]


def padded(num_bytes: int) -> int:
    """The bytes that a part of a buffer takes, so that the next one is aligned."""
    return -(-num_bytes // ALIGN) * ALIGN


def fetch(tensor: Tensor) -> Tensor:
    """`tensor` on its way to the host: not to be read before an event that is recorded after this."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
