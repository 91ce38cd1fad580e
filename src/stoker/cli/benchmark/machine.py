"""Names of the devices of this machine."""

from __future__ import annotations

import platform
from pathlib import Path

from stoker.base.cpus import num_cpus


def device_name(device: str | None = None) -> str:
    """The GPU's name when `device` is "cuda", otherwise the processor's name and the number of cores this process may use."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {num_cpus()} cores"


def cpu_name() -> str:
    """The name of the processor model, or of its architecture if unknown."""
    for line in _cpuinfo_lines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_flags() -> set[str]:
    """The instruction sets of the processor by their names in Linux; empty when /proc/cpuinfo does not list them."""
    return next((set(line.partition(":")[2].split()) for line in _cpuinfo_lines() if line.startswith("flags")), set())


def _cpuinfo_lines() -> list[str]:
    """The lines of /proc/cpuinfo; empty without that file."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
