"""A subject in a process of its own, which a benchmark measures in turn with others.

OpenMP makes a team of threads for each thread that ever computed, and teams of more threads than there are cores sleep while they wait: two
engines in one process, or an engine beside PyTorch in the main thread, are slower than each alone.
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

_subject: Any = None  # in the process that has it


class Apart:
    """What `make(*given)` returns, elsewhere. Usable as a context manager."""

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_have, initargs=(make, given))

    def measure(self, work: Callable[[Any], Any]) -> Any:
        """What `work` returns of the subject; a function of a module."""
        return self._process.submit(_work, work).result()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()


def as_built(engine: Path) -> Path:
    """A copy of the engine, whose file lies in the system's cache as a build leaves it. Pages that the system took away meanwhile, and that
    came back one by one, lie apart: products of SmolLM2's weights in float32 read them at 19 to 21 GB/s, and these at 27 to 29."""
    folder = Path(tempfile.mkdtemp(prefix="stoker-benchmark-"))
    atexit.register(shutil.rmtree, folder)
    return Path(shutil.copytree(engine, folder / engine.name))


def _have(make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    global _subject
    _subject = make(*given)


def _work(work: Callable[[Any], Any]) -> Any:
    return work(_subject)
