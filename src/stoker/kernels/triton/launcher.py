"""Launches of compiled kernels with less work on the host than `JITFunction.run` does for each.

Triton binds the arguments of every launch to the kernel's parameters, converts all options to text, compares the global constants of the
kernel with those it was compiled with, reads environment variables, and describes the launch for profilers, although none listens. A step
that is not captured launches hundreds of kernels, and so does the capture of one.

Here Triton performs the first launch of each specialization. Further ones find the compiled kernel by the types, the alignment and the
divisibility of all runtime arguments, as Triton itself determines them, and by the constants and options. They call the kernel's own
launcher, on the current device and stream.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, native_specialize_impl

_run = JITFunction.run


def _launch(self: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
    """Replaces `JITFunction.run`: launch the kernel, and return it. `args` are runtime arguments, `options` constants and options."""
    runtime = knobs.runtime
    is_observed = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or self.pre_run_hooks
    if warmup or is_observed or not _has_constants_last(self, len(args)):
        return _run(self, *args, grid=grid, warmup=warmup, **options)
    active = driver.active
    device = active.get_current_device()
    kernels, _, _, backend, _ = self.device_caches[device]
    # One call for all arguments. It distinguishes at least what Triton distinguishes: here, every argument is specialized.
    key = (native_specialize_impl(backend, args, False, True, True), *options, *options.values())
    kernel = kernels.get(key)
    if kernel is None:
        kernel = kernels[key] = _run(self, *args, grid=grid, warmup=False, **options)  # Triton's own keys in this dictionary are strings
        return kernel
    x, y, z = (*grid, 1, 1)[:3]
    stream, constants = active.get_current_stream(device), [None] * len(self.constexprs)  # which the launcher does not read
    kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *constants)
    return kernel


def _has_constants_last(function: JITFunction[Any], num_args: int) -> bool:
    """Whether the first `num_args` parameters of a kernel are its runtime arguments, and all others are constants.

    If a constant is among `args`, such as a text, it cannot be specialized as a runtime argument.
    """
    constants = function.constexprs  # numbers of parameters, in ascending order
    return len(constants) == len(function.params) - num_args and (not constants or constants[0] == num_args)


def _bind_grid(self: JITFunction[Any], grid: tuple[int, ...]) -> Any:
    """Replaces `JITFunction.__getitem__`: the function that launches the kernel with `grid`."""
    return partial(self.run, grid=grid, warmup=False)


def install() -> None:
    """Replace Triton's methods."""
    JITFunction.run = _launch
    JITFunction.__getitem__ = _bind_grid
