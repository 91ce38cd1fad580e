"""The compiled kernels as Python functions: their argument structs, and the OpenMP runtime that they share with PyTorch."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.base import env
from stoker.base.logging import get_logger
from stoker.kernels.native.build import KernelsUnavailable, built_library

log = get_logger(__name__)

# The numbers of `enum dtype` (vector.h), `enum activation` (activation.h), `enum norm` and `enum rounding` (linear.h).
FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32, E4M3 = range(7)
DTYPES = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.int8: INT8,
    torch.uint8: UINT8,
    torch.int32: INT32,
    torch.float8_e4m3fn: E4M3,
}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "gelu_quick": 4, "relu": 5, "relu2": 6}
NORMS = {None: 0, "rms": 1, "layer": 2}
ROUNDINGS = {"none": 0, "token": 1, "static": 2}

# Functions that pack the structs of the sources. A call with one pointer to a struct needs a quarter of the time of one with as many
# arguments.
LINEARS = struct.Struct("@3q").pack  # `struct linears`: the header, which is followed by these two for each linear:
CALL_ARGUMENTS = struct.Struct("@6q").pack  # `struct linear` up to `dtype`: what differs from call to call
LINEAR_ARGUMENTS = struct.Struct("@22qd").pack  # the rest of it: the weight and its fusion
SCORING = struct.Struct("@5q2d").pack  # `struct scoring` up to `linear`
WIDENING = struct.Struct("@6q").pack  # `struct widening` up to `linear`
BLOCKING = struct.Struct("@3q").pack  # `struct blocking` up to `linear`
ROPE_STORE = struct.Struct("@29q").pack
PREFILL = struct.Struct("@23qd").pack
ATTENTION = struct.Struct("@28qd").pack
NORM = struct.Struct("@15qd").pack
GREEDY = struct.Struct("@8q").pack
VERIFY = struct.Struct("@13q").pack
THREADS = struct.Struct("@q").pack
CALL = struct.Struct("@2q").pack  # `struct call` up to its arguments
REPLAY = struct.Struct("@2q").pack  # `struct replay` up to the calls

Function = Callable[[bytes], int]


class NativeKernels(NamedTuple):
    """The library's functions. Each has its packed struct as argument and returns 0, or 1 when the reference must run instead."""

    linears: Function
    gemm: Function
    score: Function
    widen: Function
    blocks: Function  # returns the size of a block
    rope_store: Function
    attention: Function
    prefill: Function
    norm: Function
    greedy: Function
    verify: Function
    replay: Function  # of recorded calls
    team_size: Function  # of a packed number of threads; returns a number of threads
    fork: int  # the address of GOMP_parallel in PyTorch's OpenMP runtime


class Call(NamedTuple):
    """A call of a kernel that returned 0."""

    address: int  # of the function
    arguments: bytes


class _Recorded(threading.local):
    """The kernels of a thread whose calls are recorded; None: they are not."""

    kernels: NativeKernels | None = None


_recorded = _Recorded()


def kernels() -> NativeKernels | str:
    """The kernels of this machine, or the reason why there are none as a string. Calls are recorded in `recorded_calls`."""
    return _recorded.kernels or load_kernels()


@contextmanager
def recorded_calls(calls: list[Call]) -> Iterator[None]:
    """Add this thread's calls of kernels to `calls` until the context ends."""
    library = load_kernels()
    assert not isinstance(library, str)
    functions = {name: _recording_function(function, calls) for name, function in library._asdict().items() if name != "fork"}
    _recorded.kernels = NativeKernels(**functions, fork=library.fork)
    try:
        yield
    finally:
        _recorded.kernels = None


def _recording_function(function: Any, calls: list[Call]) -> Function:
    """A function that calls `function` and adds the call to `calls`."""
    address = ctypes.cast(function, ctypes.c_void_p).value or 0

    def recording(arguments: bytes) -> int:
        """Call the function, and add the call if it returns 0."""
        status = int(function(arguments))
        if not status:
            calls.append(Call(address, arguments))
        return status

    return recording


@cache
def load_kernels() -> NativeKernels | str:
    """The kernels, compiled at the first call if necessary, or the reason why there are none."""
    if not env.native():
        return "turned off by STOKER_NATIVE"
    try:
        library = ctypes.CDLL(str(built_library()))
        functions = {name: _function(library, f"stoker_{name}") for name in NativeKernels._fields if name != "fork"}
        return NativeKernels(**functions, fork=_gomp_parallel_address())
    except Exception as reason:  # of any kind: the references need nothing of what may be missing on this system
        log.info("CPU kernels run in plain PyTorch: %s", reason)
        return str(reason)


def limit_threads(threads: int) -> None:
    """Set PyTorch's number of threads to `threads`, or fewer while other processes use the cores and delay the calling thread's teams."""
    library = kernels()
    count = threads if isinstance(library, str) else library.team_size(THREADS(threads))
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _function(library: ctypes.CDLL, name: str) -> Function:
    """A function of the library that reads one packed struct of arguments and returns an int."""
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def _gomp_parallel_address() -> int:
    """The address of GOMP_parallel in the OpenMP runtime that PyTorch has loaded: libgomp, or LLVM's or Intel's, which export it too.

    The threads of a second runtime would compete with PyTorch's for the same cores.
    """
    beside = Path(torch.__file__).parent
    bundled = [str(path) for folder in (beside / "lib", beside.parent / "torch.libs") for path in sorted(folder.glob("lib*omp*"))]
    for path in (*bundled, "libgomp.so.1", "libomp.so.5", "libiomp5.so"):
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    raise KernelsUnavailable("PyTorch's OpenMP runtime was not found")


class TensorInfo(NamedTuple):
    """The properties of a tensor that a kernel call needs, cached: reading them from the tensor is ten times as slow as the look-up."""

    ref: weakref.ref[Tensor]
    address: int
    dtype: int  # of DTYPES; -1 when the kernels can't read the tensor: another type, not contiguous, or not on the CPU
    shape: tuple[int, ...]
    numel: int


_infos: dict[int, TensorInfo] = {}
ABSENT = TensorInfo(lambda: None, 0, 0, (), 0)  # type: ignore[arg-type]


def tensor_info(tensor: Tensor | None) -> TensorInfo:
    """The cached properties of a tensor, ABSENT for None. Only for weights, caches and step indices, whose memory never moves."""
    if tensor is None:
        return ABSENT
    key = id(tensor)
    info = _infos.get(key)
    if info is not None and info.ref() is tensor:
        return info
    dtype = DTYPES.get(tensor.dtype, -1) if tensor.is_cpu and tensor.is_contiguous() else -1
    ref = weakref.ref(tensor, lambda _: _infos.pop(key, None))
    info = _infos[key] = TensorInfo(ref, tensor.data_ptr() if dtype >= 0 else 0, dtype, tuple(tensor.shape), tensor.numel())
    return info
