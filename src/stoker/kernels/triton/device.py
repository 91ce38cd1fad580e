"""Properties of the device that launchers need to choose a kernel, a tile and a grid.

Which compute capability a hardware feature needs is declared in `REQUIREMENTS` and nowhere else. A launcher calls `supports(x, feature)`
and uses another kernel where the answer is False.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.runtime import driver

from stoker.kernels.tuning.devices import tuning_for
from stoker.kernels.tuning.table import TuningTable

H200_NUM_SMS, H200_CAPABILITY = 132, 90
INTERPRETER = 0  # the capability of tensors on the CPU, which only Triton's interpreter receives


class Requirement(NamedTuple):
    """The compute capabilities (90: sm_90) that have a feature."""

    lowest: int
    highest: int | None = None  # None: and all later ones
    interpreted: bool = False  # whether Triton's interpreter emulates it

    def is_met(self, capability: int) -> bool:
        """Whether a device of this compute capability (or INTERPRETER) has the feature."""
        if capability == INTERPRETER:
            return self.interpreted
        return self.lowest <= capability and (self.highest is None or capability <= self.highest)


REQUIREMENTS = {
    # griddepcontrol.wait and griddepcontrol.launch_dependents; see `pdl`.
    "pdl": Requirement(90),
    # sub.bf16x2 and mul.bf16x2. Older devices have fma.rn.bf16x2 only; see `ptx.packed_arithmetic`.
    "bf16x2_arithmetic": Requirement(90),
    # wgmma.mma_async exists in sm_90a only: sm_100 has tcgen05 instead.
    "wgmma": Requirement(90, 90),
    # wgmma, and the shared memory of an H100 or H200 (227 KiB per CTA), for which the fused layer kernels are laid out.
    "fused_layer": Requirement(90, 90),
    # wgmma and TMA, and the shared memory of an H100 or H200, for which the pipeline of the GEMM for many rows is laid out.
    "large_gemm": Requirement(90, 90),
    # wgmma and the shared memory of an H100 or H200, for which the tiles of the router for many tokens are laid out.
    "router_product": Requirement(90, 90, interpreted=True),
}


def supports(x: torch.Tensor, feature: str) -> bool:
    """Whether kernels for the device of x may use `feature`, a key of `REQUIREMENTS`. For meta tensors, the compilation target counts."""
    return REQUIREMENTS[feature].is_met(capability(x))


def capability(x: torch.Tensor) -> int:
    """The compute capability of the device of x (90: sm_90).

    For meta tensors that of the compilation target; INTERPRETER for CPU tensors.
    """
    if x.is_cpu:
        return INTERPRETER
    if x.is_cuda:
        return _name_and_capability(x.device)[1]
    return int(driver.active.get_current_target().arch)


@cache
def num_sms(device: torch.device) -> int:
    """The number of SMs of a CUDA device.

    For other devices, as in ahead-of-time compilation, that of the current GPU; without a GPU and in the interpreter, that of an H200.
    """
    if device.type == "cpu" or not torch.cuda.is_available():
        return H200_NUM_SMS
    if device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_tuning(device: torch.device) -> TuningTable:
    """The tuning table of a device; for meta tensors that of the compilation target. Triton's interpreter uses an H200's."""
    if device.type == "cpu":
        return tuning_for(None, H200_CAPABILITY)
    if device.type == "cuda":
        return tuning_for(*_name_and_capability(device))
    target = int(driver.active.get_current_target().arch)
    if torch.cuda.is_available():
        name, current = _name_and_capability(torch.device("cuda", torch.cuda.current_device()))
        if current == target:
            return tuning_for(name, target)
    return tuning_for(None, target)


@cache
def _name_and_capability(device: torch.device) -> tuple[str, int]:
    """(name, compute capability such as 90) of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), 10 * major + minor
