"""What the launchers ask of a device before they choose a grid."""

from __future__ import annotations

from functools import cache

import torch

H200_MULTIPROCESSORS = 132


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H200's count where there is no device (interpreter, ahead-of-time compilation)."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
