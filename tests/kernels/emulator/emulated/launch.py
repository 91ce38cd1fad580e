"""Launches of Triton and Gluon kernels on the emulated device. Arguments are CPU tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from emulated.memory import Tensors
from emulated.ordering import History
from emulated.parse import parse
from emulated.program import Launch, run_grid
from emulated.stream import Stream
from stoker.kernels.triton.aot.offline_target import compilation_target


@contextmanager
def emulating(
    seed: int = 0, num_ctas: int = 132, capability: int = 90, edit_ptx: Callable[[str, str], str] = lambda name, ptx: ptx
) -> Iterator[Counter[str]]:
    """Inside the block, launches run on an emulated device with `num_ctas` SMs, in one stream.

    seed: seeds the random order of CTAs. edit_ptx: maps (kernel name, PTX) to the PTX that runs.
    Yields a counter of bank conflicts in shared memory, by instruction name.
    """
    compile_only, conflicts, stream = JITFunction.run, Counter[str](), Stream()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        names = self.signature.parameters
        bound = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
        bound.apply_defaults()
        ptx = edit_ptx(compiled.metadata.name, compiled.asm["ptx"])
        _launch(compiled, ptx, list(bound.arguments.values()), grid, seed, conflicts, stream)

    with ExitStack() as patches:
        patches.enter_context(compilation_target(capability))
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False, create=True))
        for name, module in list(sys.modules.items()):
            if name.startswith("stoker.kernels.triton.") and hasattr(module, "num_sms"):
                patches.enter_context(mock.patch.object(module, "num_sms", lambda device: num_ctas))
        yield conflicts


def _launch(
    compiled: CompiledKernel, ptx: str, arguments: list[Any], grid: tuple[int, ...], seed: int, conflicts: Counter[str], stream: Stream
) -> None:
    kernel = parse(ptx)
    kinds = list(compiled.src.signature.values())
    flat = [(kind, value) for kind, value in zip(_flat(kinds), _flat(arguments, kinds), strict=True) if kind != "constexpr"]
    tensors = Tensors([value for _, value in flat if isinstance(value, torch.Tensor)])
    params = {}
    for name, (kind, value) in zip(kernel.params, flat, strict=False):  # Triton's own parameters follow, and are not used
        if isinstance(value, torch.Tensor):
            value = tensors.address(value)
        params[name] = np.array([value], np.float32 if kind == "fp32" else np.int64).view(np.uint32 if kind == "fp32" else np.uint64)
    x, y, z = (*grid, 1, 1)[:3]
    memory, granule, is_dependent = tensors.memory, kernel.granule("global"), bool(compiled.metadata.launch_pdl)
    pending = stream.begin(tensors, granule, is_dependent)
    memory.history = History("global", len(memory.data), memory.begin, granule, kernel.has_async_proxy, pending)
    clocks = run_grid(Launch(kernel, params, memory, compiled.metadata.shared, (x, y, z), seed, is_dependent, conflicts))
    stream.end(tensors, memory.history, clocks, is_dependent)
    tensors.copy_back()


def _flat(values: Any, like: Any = None) -> Iterator[Any]:
    """`values` without nesting. Only tuples whose counterparts in `like` are tuples are flattened; others are one value."""
    for i, value in enumerate(values):
        other = value if like is None else like[i]
        if isinstance(other, tuple):
            yield from _flat(value, other)
        else:
            yield value
