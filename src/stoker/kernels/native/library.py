"""The compiled kernels as functions of Python: the structs that they take, and the threads that they share with PyTorch."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.base import env
from stoker.base.logging import get_logger
from stoker.kernels.native.build import Unavailable, built

log = get_logger(__name__)

# As `enum dtype`, `enum activation` and `enum norm` of the sources number them.
FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32 = range(6)
DTYPES = {
    torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int8: INT8, torch.uint8: UINT8, torch.int32: INT32,
}  # fmt: skip
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "gelu_quick": 4, "relu": 5, "relu2": 6}
NORMS = {None: 0, "rms": 1, "layer": 2}

# The structs of the sources. One pointer to a struct costs a call a quarter of what as many arguments do.
LINEARS, GIVEN, STAYING = (struct.Struct(code).pack for code in ("@3q", "@6q", "@18qd"))  # a head, and two parts of each linear
WIDENING = struct.Struct("@5q").pack  # before the two parts of a linear
ROPE_STORE = struct.Struct("@29q").pack
ATTENTION = struct.Struct("@24qd").pack

Function = Callable[[bytes], int]


class Kernels(NamedTuple):
    """The library's functions. Each takes its packed struct and returns 0, or 1 where the reference is to run instead."""

    linears: Function
    widen: Function
    rope_store: Function
    attention: Function
    fork: int  # the address of GOMP_parallel in PyTorch's OpenMP runtime


@cache
def kernels() -> Kernels | str:
    """The kernels of this machine, compiled now if they were not yet, or why there are none."""
    if not env.native():
        return "turned off by STOKER_NATIVE"
    try:
        library = ctypes.CDLL(str(built()))
        functions = {name: _function(library, f"stoker_{name}") for name in ("linears", "widen", "rope_store", "attention")}
        return Kernels(**functions, fork=_fork())
    except Exception as why:  # whatever a system lacks, the references run
        log.info("CPU kernels are plain torch: %s", why)
        return str(why)


def _function(library: ctypes.CDLL, name: str) -> Function:
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def _fork() -> int:
    """GOMP_parallel of the runtime that PyTorch has loaded: libgomp's own, which LLVM's and Intel's runtimes have too.

    A second runtime's threads would spin against PyTorch's for the same cores.
    """
    beside = Path(torch.__file__).parent
    bundled = [str(path) for folder in (beside / "lib", beside.parent / "torch.libs") for path in sorted(folder.glob("lib*omp*"))]
    for path in (*bundled, "libgomp.so.1", "libomp.so.5", "libiomp5.so"):
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    raise Unavailable("PyTorch's OpenMP runtime was not found")


class Known(NamedTuple):
    """What a call needs to know of a tensor that many calls bring: looking again costs ten times the look-up."""

    ref: weakref.ref[Tensor]
    address: int
    dtype: int  # of DTYPES; -1 where the kernels cannot read it: of another type, not dense, or not on the CPU
    shape: tuple[int, ...]
    numel: int


_known: dict[int, Known] = {}
NOTHING = Known(lambda: None, 0, 0, (), 0)  # type: ignore[arg-type]


def known(tensor: Tensor | None) -> Known:
    """Of a weight, a cache, or an index of the step: none of them is given other memory while it lives. NOTHING of None."""
    if tensor is None:
        return NOTHING
    key = id(tensor)
    found = _known.get(key)
    if found is not None and found.ref() is tensor:
        return found
    dtype = DTYPES.get(tensor.dtype, -1) if tensor.is_cpu and tensor.is_contiguous() else -1
    ref = weakref.ref(tensor, lambda _: _known.pop(key, None))
    found = _known[key] = Known(ref, tensor.data_ptr() if dtype >= 0 else 0, dtype, tuple(tensor.shape), tensor.numel())
    return found
