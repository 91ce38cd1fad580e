"""Compiles kernels for a given GPU on any machine, with or without that GPU, and reports their resource usage.

Inside `compiling(...)`, launchers compile exactly what they would launch and launch nothing: called on meta tensors of a model's shapes,
they fill Triton's cache directory for the target. `compile_for` compiles one kernel from a signature.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class KernelResources:
    """The resource usage of one compiled kernel, per thread (registers, spills, stack) or per CTA (shared memory)."""

    name: str
    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads
    stack_bytes: int  # per thread
    shared_bytes: int  # per CTA
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class _OfflineDriver:
    """The methods that `JITFunction` calls on Triton's driver before a launch, for a device that is absent."""

    target: GPUTarget

    def get_current_device(self) -> str:
        """The key of JITFunction's cache in memory. No real device has it."""
        return f"{self.target.backend}:{self.target.arch}"  # the key of JITFunction's in-memory cache: no real device has it

    def get_current_stream(self, device: str) -> int:
        """0: nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(capability: int = 90) -> Iterator[list[CompiledKernel]]:
    """Yield a list of compiled kernels, which every launcher that is called in the block extends by the kernels that it would launch.

    `capability` is that of the target (90: sm_90). Each kernel is listed once. Nothing runs and outputs stay unwritten, so pass meta
    tensors. Not for use while another thread launches kernels.
    """
    compiled: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel | None:
        """Replaces `JITFunction.run`: compile, add the kernel to the list, and do not launch it."""
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and all(kernel is not other for other in compiled):
            compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        with compilation_target(capability):
            yield compiled
    finally:
        JITFunction.run = run


@contextmanager
def compilation_target(capability: int) -> Iterator[GPUTarget]:
    """Make Triton compile for `capability` within the block, whatever device this machine has."""
    active, target = driver._active, GPUTarget("cuda", capability, 32)
    driver.set_active(_OfflineDriver(target))
    try:
        yield target
    finally:
        driver._active = active


def compile_for(
    kernel: JITFunction,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    capability: int = 90,
) -> CompiledKernel:
    """Compile `kernel` for the argument types of `signature` (name → "*bf16", "i32", "fp32") and the constants `constexprs`.

    Pointers are assumed to be 16-byte aligned, as PyTorch's allocations are.
    """
    types = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name].startswith("*")}
    source = ASTSource(kernel, types, dict(constexprs), aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, "num_stages": num_stages})


def resources(kernel: CompiledKernel, report: str | None = None) -> KernelResources:
    """The resource usage of a compiled kernel. Registers, spills and stack come from `report`, the output of `ptxas -v` for its PTX.

    Without a report, Triton's ptxas runs again. `shared_bytes` is the shared memory that Triton allocates, static and dynamic.
    """
    metadata = kernel.metadata
    report = report or _assemble(kernel.asm["ptx"])
    stack, stores, loads = (
        int(n) for n in re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    )
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    return KernelResources(metadata.name, registers, stores + loads, stack, metadata.shared, metadata.num_warps, metadata.num_stages)


def _assemble(ptx: str) -> str:
    """Run `ptxas -v` on PTX in a temporary folder and return its report. Raises CalledProcessError."""
    architecture = re.search(r"\.target\s+(\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={architecture}", str(source), "-o", str(source.with_suffix(".cubin"))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
