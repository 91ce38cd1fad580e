"""What the launchers ask of a device before they choose a grid."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

H200_MULTIPROCESSORS = 132


def capability(x: torch.Tensor) -> int:
    """90 for sm_90: of x's device, or of the one that is compiled for; 0 in the interpreter."""
    if x.is_cpu:
        return 0
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        return 10 * major + minor
    return int(driver.active.get_current_target().arch)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; what is compiled ahead is for the device at hand, or for an H200, and so is the interpreter."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return H200_MULTIPROCESSORS
    if device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(device).multi_processor_count
