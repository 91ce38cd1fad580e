"""Performs many launches with Triton's own `JITFunction.run`, and twice with `kernels.triton.launcher`. Nothing is compiled.

Prints as JSON the launches of Triton, those of the launcher's second calls, and the names of kernels whose second calls it left to Triton.
A launch is [specialization, grid, stream, device, arguments].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.compiler
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stoker.kernels.triton import launcher


class Group(NamedTuple):
    pointer: Tensor | None
    stride: int


class Shape(NamedTuple):
    size: int
    name: str


@triton.jit(do_not_specialize=["count"])
def kernel(x_ptr, bias_ptr, group, count, stride, scale, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    pass


@triton.jit
def mixed_kernel(x_ptr, WIDTH: tl.constexpr, n, LAST: tl.constexpr = 3):
    pass


@triton.jit
def named_kernel(x_ptr, NAME: tl.constexpr, n, LAST: tl.constexpr = 3):
    pass


class FakeDriver:
    """Two devices, of which `device` is the current one."""

    device = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + 10 * device


class RecordedKernel:
    """What `triton.compile` returns here. Its launches are listed in `launches`."""

    function, packed_metadata = 1, ()
    launches: list[list[Any]] = []
    num_compiled = 0

    def __init__(self, source: Any, target: GPUTarget, options: dict[str, Any], **unused: Any) -> None:
        RecordedKernel.num_compiled += 1
        self.text = repr([source.signature, source.constants, source.attrs, sorted(options.items(), key=str)])
        self.is_constant = [kind == "constexpr" for kind in source.signature.values()]

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, packed: tuple[()], metadata: None, enter: Any, exit: Any, *arguments: Any
    ) -> None:
        values = [None if fixed else value for fixed, value in zip(self.is_constant, arguments, strict=True)]
        self.launches.append([self.text, [x, y, z], stream, FakeDriver.device, repr(values)])


def tensor(offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(64, dtype=dtype)[offset:]


def cases() -> list[Callable[[], Any]]:
    """Functions that launch a kernel, each with one argument that differs from those of the first."""
    tensors = [tensor(), tensor(1), tensor(8), tensor(dtype=torch.float32), tensor(dtype=torch.int8), tensor(1, torch.int8)]
    integers = [0, 1, 2, 16, 17, 48, (1 << 31) - 1, 1 << 31, 1 << 40, -1, -16]
    constants: list[dict[str, Any]] = [
        {"WIDTH": 4, "num_warps": 8}, {"num_warps": 8, "WIDTH": 4}, {"WIDTH": 8, "num_warps": 4, "num_stages": 2},
        {"WIDTH": 8, "num_warps": 4, "launch_pdl": True},
    ]  # fmt: skip
    base: dict[str, Any] = {
        "x": tensor(), "bias": tensor(), "group": Group(tensor(), 64), "count": 5, "stride": 32, "scale": 0.5, "grid": (3,),
        "shape": Shape(4, "a"), "constants": {"WIDTH": 8, "num_warps": 4},
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {}, *({"x": one} for one in tensors), *({"bias": one} for one in (None, *tensors)),
        *({"group": Group(one, 64)} for one in (None, *tensors)), *({"group": Group(tensor(), one)} for one in integers),
        *({"count": one} for one in integers), *({"stride": one} for one in integers), *({"scale": one} for one in (1.0, 1, 16, True)),
        *({"grid": one} for one in ((1,), (2, 3), (2, 3, 4))), {"shape": Shape(4, "b")}, {"shape": Shape(5, "a")},
        *({"constants": one} for one in constants),
    ]  # fmt: skip

    def case(change: dict[str, Any]) -> Callable[[], Any]:
        x, bias, group, count, stride, scale, grid, shape, options = (base | change).values()
        return lambda: kernel[grid](x, bias, group, count, stride, scale, SHAPE=shape, **options)

    positional = [lambda n=n: mixed_kernel[(2,)](tensor(), 4, n, num_warps=2) for n in integers]
    named = [lambda n=n: mixed_kernel[(2,)](tensor(), n=n, WIDTH=4, LAST=5) for n in integers]
    texts = [lambda name=name: named_kernel[(2,)](tensor(), name, 16) for name in ("a", "b")]
    return [*map(case, changes), *positional, *named, *texts]


def launches_of(calls: list[Callable[[], Any]]) -> list[list[Any]]:
    """The launches of all cases on both devices."""
    RecordedKernel.launches.clear()
    for FakeDriver.device in (0, 1):
        for call in calls:
            call()
    return list(RecordedKernel.launches)


def main() -> None:
    triton.compiler.compile = RecordedKernel
    driver.set_active(FakeDriver())
    calls, by_triton = cases(), []
    assert JITFunction.run is launcher._launch
    JITFunction.run = launcher._run
    expected = launches_of(calls)
    num_compiled = RecordedKernel.num_compiled
    JITFunction.run = launcher._launch
    assert launches_of(calls) == expected, "the first launches"
    run = launcher._run

    def counted(function: Any, *args: Any, **options: Any) -> Any:
        by_triton.append(function.__name__)
        return run(function, *args, **options)

    launcher._run = counted
    found = launches_of(calls)
    assert RecordedKernel.num_compiled == num_compiled, "a kernel was compiled again"
    print(json.dumps([expected, found, by_triton]))
    by_triton.clear()
    triton.knobs.runtime.launch_enter_hook.add(print)
    calls[0]()
    triton.knobs.runtime.launch_enter_hook.remove(print)
    calls[0]()
    assert by_triton == ["kernel"], "Triton's own method calls the hooks of profilers"


if __name__ == "__main__":
    main()
