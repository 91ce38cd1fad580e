"""Launches of Triton's and Gluon's kernels, on tensors of this machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from emulated.memory import Tensors
from emulated.parse import parse
from emulated.program import run_grid
from stoker.kernels.triton.aot.offline_target import compilation_target


@contextmanager
def emulating(seed: int = 0, programs: int = 132, capability: int = 90) -> Iterator[Counter[str]]:
    """Let launches in the block run here, as on a device of `programs` multiprocessors. seed: of the order in which programs take turns.

    Yields what accesses to shared memory lose in its banks, by instruction.
    """
    compile_only, lost = JITFunction.run, Counter[str]()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        names = self.signature.parameters
        given = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
        given.apply_defaults()
        _launch(compiled, list(given.arguments.values()), grid, seed, lost)

    with ExitStack() as patches:
        patches.enter_context(compilation_target(capability))
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False, create=True))
        for name, module in list(sys.modules.items()):
            if name.startswith("stoker.kernels.triton.") and hasattr(module, "num_sms"):
                patches.enter_context(mock.patch.object(module, "num_sms", lambda device: programs))
        yield lost


def _launch(compiled: CompiledKernel, given: list[Any], grid: tuple[int, ...], seed: int, lost: Counter[str]) -> None:
    kernel = parse(compiled.asm["ptx"])
    kinds = list(compiled.src.signature.values())
    flat = [(kind, value) for kind, value in zip(_flat(kinds), _flat(given, kinds), strict=True) if kind != "constexpr"]
    tensors = Tensors([value for _, value in flat if isinstance(value, torch.Tensor)])
    params = {}
    for name, (kind, value) in zip(kernel.params, flat, strict=False):  # Triton's own, after these, are not used
        if isinstance(value, torch.Tensor):
            value = tensors.address(value)
        params[name] = np.array([value], np.float32 if kind == "fp32" else np.int64).view(np.uint32 if kind == "fp32" else np.uint64)
    x, y, z = (*grid, 1, 1)[:3]
    run_grid(kernel, params, tensors.memory, compiled.metadata.shared, (x, y, z), seed, lost)
    tensors.give_back()


def _flat(values: Any, like: Any = None) -> Iterator[Any]:
    """Tuples one by one; what `like` has as one is one."""
    for i, value in enumerate(values):
        other = value if like is None else like[i]
        if isinstance(other, tuple):
            yield from _flat(value, other)
        else:
            yield value
