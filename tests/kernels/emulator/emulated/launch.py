"""Launches of Triton and Gluon kernels on the emulated device. Arguments are CPU tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from emulated.memory import Tensors
from emulated.operands import Step
from emulated.ordering import History
from emulated.parse import Kernel
from emulated.program import Launch, parsed, run_grids
from emulated.stream import Stream
from emulated.tensor_copies import TensorMap
from stoker.kernels.triton.aot.offline_target import compilation_target


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A launch that waits for those of the other ranks. arguments: (type in the signature, value) of each kernel parameter."""

    kernel: Kernel
    steps: list[Step | None]
    arguments: list[tuple[str, Any]]
    grid: tuple[int, int, int]
    shared_bytes: int
    is_dependent: bool

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        for _, value in self.arguments:
            if isinstance(value, torch.Tensor | TensorDescriptor):
                yield value.base if isinstance(value, TensorDescriptor) else value


@contextmanager
def emulating(
    seed: int = 0, num_ctas: int = 132, capability: int = 90, edit_ptx: Callable[[str, str], str] = lambda name, ptx: ptx,
    num_ranks: int = 1, shared_between_ranks: Sequence[torch.Tensor] = (),
) -> Iterator[Counter[str]]:  # fmt: skip
    """Inside the block, launches run on an emulated device with `num_ctas` SMs, in one stream.

    With several ranks, a launch waits until `num_ranks` launches, one of each rank, can run at the same time, each on a device of its own.
    A kernel may have the address of a tensor of `shared_between_ranks` as an integer argument.

    seed: seeds the random order of CTAs. edit_ptx: maps (kernel name, PTX) to the PTX that runs.
    Yields a counter of bank conflicts in shared memory, by instruction name.
    """
    compile_only, conflicts, stream = JITFunction.run, Counter[str](), Stream()
    waiting: list[_Prepared] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        names = self.signature.parameters
        bound = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
        bound.apply_defaults()
        ptx = edit_ptx(compiled.metadata.name, compiled.asm["ptx"])
        waiting.append(_prepare(compiled, ptx, list(bound.arguments.values()), grid))
        if len(waiting) == num_ranks:
            _launch(waiting, shared_between_ranks, seed, conflicts, stream)
            waiting.clear()

    with ExitStack() as patches:
        patches.enter_context(compilation_target(capability))
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False, create=True))
        for name, module in list(sys.modules.items()):
            if name.startswith("stoker.kernels.triton.") and hasattr(module, "num_sms"):
                patches.enter_context(mock.patch.object(module, "num_sms", lambda device: num_ctas))
        yield conflicts
    assert not waiting, "a rank has not launched its kernel"


def _prepare(compiled: CompiledKernel, ptx: str, arguments: list[Any], grid: tuple[int, ...]) -> _Prepared:
    kinds = list(compiled.src.signature.values())
    flat = [
        (kind, value)
        for of_argument, argument in zip(_flat(kinds), _flat(arguments, kinds), strict=True)
        if of_argument != "constexpr"
        for kind, value in _parameters(of_argument, argument)
    ]
    x, y, z = (*grid, 1, 1)[:3]
    return _Prepared(*parsed(ptx), flat, (x, y, z), compiled.metadata.shared, bool(compiled.metadata.launch_pdl))


def _launch(ranks: list[_Prepared], shared: Sequence[torch.Tensor], seed: int, conflicts: Counter[str], stream: Stream) -> None:
    """Run the launches of all ranks together. Their tensors are at different addresses of one memory."""
    tensors = Tensors([*shared, *(tensor for rank in ranks for tensor in rank.tensors)])
    memory, granule = tensors.memory, min(rank.kernel.granule("global") for rank in ranks)
    is_dependent, has_async_proxy = all(rank.is_dependent for rank in ranks), any(rank.kernel.has_async_proxy for rank in ranks)
    pending = stream.begin(tensors, granule, is_dependent)
    memory.history = History("global", len(memory.data), memory.begin, granule, has_async_proxy, pending)
    addresses = _Addresses(tensors, shared)
    launches = [
        Launch(
            rank.kernel,
            rank.steps,
            _params(rank, tensors, addresses),
            memory,
            rank.shared_bytes,
            rank.grid,
            rank.is_dependent,
            conflicts,
            _tensor_maps(rank, tensors),
        )
        for rank in ranks
    ]
    stream.end(tensors, memory.history, run_grids(launches, seed), is_dependent)
    tensors.copy_back()


class _Addresses:
    """The addresses on the device of the memory that ranks share, by its addresses on the host."""

    def __init__(self, tensors: Tensors, shared: Sequence[torch.Tensor]) -> None:
        self.begins = {tensor.data_ptr(): (tensor.nbytes, tensors.address(tensor)) for tensor in shared}

    def of(self, value: int) -> int:
        """The address on the device for an address on the host; other integers are returned as they are."""
        places = (address + value - begin for begin, (size, address) in self.begins.items() if begin <= value < begin + size)
        return next(places, value)


def _params(prepared: _Prepared, tensors: Tensors, addresses: _Addresses) -> dict[str, NDArray[np.uint64]]:
    """The values of a kernel's parameters by name. `addresses`: of the memory that ranks share."""
    params = {}
    for name, (kind, value) in zip(prepared.kernel.params, prepared.arguments, strict=False):  # Triton's own parameters are not used
        if isinstance(value, TensorDescriptor):
            continue
        value = tensors.address(value) if isinstance(value, torch.Tensor) else addresses.of(value) if kind == "i64" else value
        params[name] = np.array([value], np.float32 if kind == "fp32" else np.int64).view(np.uint32 if kind == "fp32" else np.uint64)
    return params


def _parameters(kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(kind, value) of the kernel parameters of an argument: those of a descriptor are a tensor map, its shape and its strides."""
    yield kind, value
    if isinstance(value, TensorDescriptor):
        yield from (("i32", size) for size in value.shape)
        yield from (("i64", stride) for stride in value.strides)


def _tensor_maps(prepared: _Prepared, tensors: Tensors) -> dict[str, TensorMap]:
    """The tensor maps of a kernel's parameters by name."""
    return {
        name: TensorMap(
            tensors.address(value.base), (value.shape[0], value.shape[1]), value.strides[0] * value.base.itemsize, value.base.itemsize,
            (value.block_shape[0], value.block_shape[1]), value.layout.swizzle_byte_width,
        )
        for name, (_, value) in zip(prepared.kernel.params, prepared.arguments, strict=False)
        if isinstance(value, TensorDescriptor)
    }  # fmt: skip


def _flat(values: Any, like: Any = None) -> Iterator[Any]:
    """`values` without nesting. Only tuples whose counterparts in `like` are tuples are flattened; others are one value."""
    for i, value in enumerate(values):
        other = value if like is None else like[i]
        if isinstance(other, tuple):
            yield from _flat(value, other)
        else:
            yield value
