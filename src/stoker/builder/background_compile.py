"""Compiles an engine's kernels while its weights are converted: they depend on the engine's config.json alone."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stoker.builder.build_plan import BuildPlan
from stoker.engine.config_file import CONFIG_FILE
from stoker.engine.publish import write_config

# Receives (stage, done, total).
Progress = Callable[[str, int, int], None]
# Compiles the kernels of the engine in a directory, which has only a config.json, and adds a file with them.
CompileKernels = Callable[[Path, Progress], None]


class _BuildFailed(Exception):
    """Raised in the compiling thread to end it."""


@contextmanager
def compile_in_background(plan: BuildPlan, kernels: CompileKernels | None, progress: Progress) -> Iterator[Callable[[], list[Path]]]:
    """Run `kernels` in a thread during the block. Yields a function that waits for it and returns the files that it wrote.

    When the build fails, the thread ends at its next progress report.
    """
    if kernels is None:
        yield list
        return
    has_ended = threading.Event()

    def report(stage: str, done: int, total: int) -> None:
        """Report progress of the thread, or end it if the build has ended."""
        if has_ended.is_set():
            raise _BuildFailed
        progress(stage, done, total)

    with tempfile.TemporaryDirectory(prefix="stoker-kernels-") as folder, ThreadPoolExecutor(1, "kernels") as pool:
        directory = Path(folder)
        write_config(directory, msgspec.structs.replace(plan.config, weights="dummy", files={}))
        compiling = pool.submit(kernels, directory, report)

        def compiled() -> list[Path]:
            """Wait for the compilation, and return its files."""
            compiling.result()
            return [file for file in directory.iterdir() if file.name != CONFIG_FILE]

        try:
            yield compiled
        finally:
            has_ended.set()
