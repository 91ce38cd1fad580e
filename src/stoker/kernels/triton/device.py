"""What the launchers ask of a device before they choose a grid."""

from __future__ import annotations

from functools import cache

import torch

H200_MULTIPROCESSORS = 132


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; what is compiled ahead is for the device at hand, or for an H200, and so is the interpreter."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return H200_MULTIPROCESSORS
    if device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(device).multi_processor_count
