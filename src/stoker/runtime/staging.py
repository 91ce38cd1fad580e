"""Asynchronous copies between the host and a device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MIN_BYTES = 1 << 16  # buffers should rarely grow, because pinning memory synchronizes the device
ALIGN = 16  # bytes; kernels are compiled for aligned arguments


class StagingBuffers:
    """Host buffers from which steps copy to the device, used in rotation. They are pinned if the device is a GPU.

    A step uses at most one buffer, and a buffer is reused after the step that used it has ended.
    """

    def __init__(self, device: torch.device, num_in_flight: int = 2) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * (num_in_flight + 2)
        self._current = 0

    def next_buffer(self, num_bytes: int) -> Tensor:
        """The next host buffer: uint8 [num_bytes], not initialized."""
        if self.device.type != "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8)
        self._current = (self._current + 1) % len(self._buffers)
        if self._buffers[self._current].numel() < num_bytes:
            self._buffers[self._current] = torch.empty(2 * max(num_bytes, _MIN_BYTES), dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._current][:num_bytes]

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Start to copy the arrays to the device with one copy. Returns tensors of the same shapes and dtypes."""
        starts = [0, *itertools.accumulate(padded(array.nbytes) for array in arrays)]
        host = self.next_buffer(starts[-1])
        for array, start in zip(arrays, starts, strict=False):
            host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device = host.to(self.device, non_blocking=True) if arrays else host
        return [
            device[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]


def padded(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of ALIGN, so that the next part of a buffer is aligned."""
    return -(-num_bytes // ALIGN) * ALIGN


def copy_to_host(tensor: Tensor) -> Tensor:
    """Start to copy `tensor` to pinned host memory. The result may be read after an event that is recorded after this call."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
