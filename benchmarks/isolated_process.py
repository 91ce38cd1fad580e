"""Runs each measured object in its own process.

OpenMP creates a team of threads for each thread that ever computed. If teams have more threads than there are cores, waiting threads sleep:
two engines in one process, or an engine and PyTorch in the main thread, are slower than each of them alone.
"""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_measured: Any = None  # in the child process


class IsolatedProcess:
    """A process with the object that `create(*args)` returns. Usable as a context manager."""

    def __init__(self, create: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=_initialize, initargs=(create, args))

    def measure(self, work: Callable[[Any], Any]) -> Any:
        """The result of `work(object)` in the process. `work` is a function of a module."""
        return self._process.submit(_run, work).result()

    def __enter__(self) -> IsolatedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()


def copy_engine(engine: Path) -> Path:
    """A copy of the engine, whose file is contiguous in the page cache as after a build.

    Pages that were evicted and read again are scattered: products of SmolLM2 in float32 read them at 19 to 21 GB/s, and those of a copy at
    27 to 29 GB/s.
    """
    folder = Path(tempfile.mkdtemp(prefix="stoker-benchmark-"))
    atexit.register(shutil.rmtree, folder)
    return Path(shutil.copytree(engine, folder / engine.name))


def _initialize(create: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _measured
    _measured = create(*args)


def _run(work: Callable[[Any], Any]) -> Any:
    return work(_measured)
