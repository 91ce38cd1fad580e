"""Kernels compiled before they are needed, for a GPU that need not be here.

`collecting` lists what launchers called on meta tensors would compile, with the signatures, constants and argument attributes that
Triton's own binder finds, so a kernel that is compiled from the list has the cache key that the real launch asks for. `compile_jobs`
works the list off in processes of its own, and makes the host libraries of the launches with it (`launchers`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from stoker.base import env
from stoker.kernels.triton.aot import host_launchers as launchers
from stoker.kernels.triton.aot import offline_target as compiler
from stoker.kernels.triton.aot.host_launchers import Launch


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile: its function, and the specialization as Triton serializes it."""

    module: str
    name: str
    data: str
    folder: str  # of Triton's cache that will hold it

    def is_cached(self, cache: Path) -> bool:
        return any((cache / self.folder).glob("__grp__*.json"))


@contextlib.contextmanager
def collecting(capability: int) -> Iterator[dict[str, Job]]:
    """Yield a dict that receives each kernel that launchers called in the block would compile, by its folder. Nothing runs or compiles."""
    jobs: dict[str, Job] = {}
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, repr: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, already_compiled: bool) -> bool:
        name = f"{fn.module}.{fn.name}"
        if (name, key) not in seen:
            seen.add((name, key))
            job = _job(fn, compile, chosen)
            jobs[job.folder] = job
        return True  # compiles nothing

    hook = triton.knobs.runtime.jit_cache_hook
    with compiler.compiling(capability), compiler.target(capability) as chosen:
        triton.knobs.runtime.jit_cache_hook = note
        try:
            yield jobs
        finally:
            triton.knobs.runtime.jit_cache_hook = hook


def _job(fn: Any, compile: dict[str, Any], chosen: GPUTarget) -> Job:
    """What `triton.compile` would look up: the digest of Triton itself, the source, the target, the options and the environment.

    Raises ValueError for a constant that is the name of a type: Triton's serialization would make a type of it, and the kernel another.
    """
    for value in compile["constants"].values():
        if isinstance(value, str) and tl.dtype.is_dtype(value):
            raise ValueError(f"{fn.module}.{fn.name} has a constant {value!r}, which is the name of a type: choose another name")
    source = fn.jit_function.ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
    backend = make_backend(chosen)
    options = backend.parse_options(_tuples(json.loads(compile["specialization_data"])["options"]))
    variables = triton.compiler.compiler.get_cache_invalidating_env_vars()
    key = hashlib.sha256(get_cache_key(source, backend, options, variables).encode()).digest()
    return Job(fn.module, fn.name, compile["specialization_data"], base64.b32encode(key).decode().rstrip("="))


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def compile_jobs(
    jobs: list[Job], cache: Path, capability: int, processes: int, done: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Compile `jobs` into Triton's cache directory `cache`. `done` is told (finished, of how many).

    Raises RuntimeError with the end of a process's output when one fails.
    """
    waiting, finished = iter(jobs), 0

    def work() -> None:
        nonlocal finished
        process = _Process(cache, capability)
        try:
            for job in waiting:
                process.compile(job)
                finished += 1
                done(finished, len(jobs))
        finally:
            process.close()

    with ThreadPoolExecutor(max(1, min(processes, len(jobs)))) as pool:
        for each in [pool.submit(work) for _ in range(min(processes, len(jobs)))]:
            each.result()


class _Process:
    """A Python process that compiles one kernel after another: Triton's compiler keeps Python's lock."""

    def __init__(self, cache: Path, capability: int) -> None:
        variables = {name: value for name, value in env.child_environment(OMP_NUM_THREADS="1").items() if name != "TRITON_INTERPRET"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(cache), str(capability)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=variables,
        )  # fmt: skip

    def compile(self, job: Job) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([job.module, job.name, job.data]) + "\n")
            self._process.stdin.flush()
        if self._process.stdout.readline() != "compiled\n":
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{job.module}.{job.name} was not compiled: {self._errors.read().decode(errors='replace')[-2000:]}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._errors.close()


def main(cache: Path, capability: int) -> None:
    """A process of `compile_jobs`: jobs come in on standard input, a line each."""
    answers, sys.stdout = sys.stdout, sys.stderr
    triton.knobs.cache.dir = str(cache)
    triton.knobs.compilation.store_binary_only = True
    with compiler.target(capability):
        for line in sys.stdin:
            module, name, data = json.loads(line)
            function: JITFunction = getattr(importlib.import_module(module), name)
            kernel = function.preload(data)
            launchers.build(Launch.of(json.loads(data)["signature"], kernel.metadata._asdict()), cache)
            print("compiled", file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
