"""Performs the launches of `compile_all` with Triton's `JITFunction.run`, and twice with `kernels.triton.launcher`. Nothing is compiled.

Prints as JSON the names of the launches whose kernels differ, and the names of kernels that the launcher left to Triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import triton.compiler
from compile_all import LAUNCHES
from record_launches import FakeDriver, RecordedKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stoker.kernels.triton import launcher


def kernels_of(launch: Callable[[], Any]) -> list[list[Any]]:
    RecordedKernel.launches.clear()
    launch()
    return list(RecordedKernel.launches)


def main() -> None:
    triton.compiler.compile = RecordedKernel
    driver.set_active(FakeDriver())
    assert JITFunction.run is launcher._launch
    run, by_triton, different = launcher._run, set(), []

    def noted(function: Any, *args: Any, **options: Any) -> Any:
        by_triton.add(function.__name__)
        return run(function, *args, **options)

    for name, launch in LAUNCHES.items():
        JITFunction.run = run
        expected = kernels_of(launch)
        JITFunction.run, launcher._run = launcher._launch, run
        first = kernels_of(launch)
        launcher._run = noted
        if not expected or not expected == first == kernels_of(launch):
            different.append(name)
    print(json.dumps([different, sorted(by_triton)]))


if __name__ == "__main__":
    main()
