"""Kernels compiled before their first launch, on a machine that may have no GPU.

`collecting` lists what launchers that run on meta tensors would compile. It records the signatures, constants and argument attributes that
Triton's own binder finds, so that a kernel which is compiled from the list has the cache key that the real launch looks up. `compile_jobs`
compiles the list in several processes, and with each kernel the host library that launches it (`host_launchers`).
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
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from stoker.base import env
from stoker.kernels.triton.aot.host_launchers import LaunchSignature, build_launcher
from stoker.kernels.triton.aot.offline_target import compilation_target, compiling
from stoker.kernels.triton.aot.specialization import Specialization


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel to compile."""

    module: str
    name: str  # of the function in `module`
    specialization: str  # JSON of a `Specialization`
    folder: str  # of Triton's cache directory: the cache key

    def is_cached(self, cache: Path) -> bool:
        """Whether Triton's cache directory `cache` holds the complete compiled kernel."""
        return any((cache / self.folder).glob("__grp__*.json"))


@contextlib.contextmanager
def collecting(capability: int) -> Iterator[dict[str, CompileJob]]:
    """Yield a dict of compile jobs, which every launcher that is called in the block fills with the kernels that it would launch.

    `capability` is that of the target (90: sm_90). The keys are the kernels' folders in Triton's cache. Nothing runs and nothing is
    compiled. Not for a process that launches kernels at the same time.
    """
    jobs: dict[str, CompileJob] = {}
    seen: set[tuple[str, str]] = set()

    def record(*, key: str, repr: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, already_compiled: bool) -> bool:
        """Triton's hook before a compilation: add the job, and return True to skip the compilation and the launch."""
        name = f"{fn.module}.{fn.name}"
        if (name, key) not in seen:
            seen.add((name, key))
            job = _job(fn, Specialization.of_hook(compile), target)
            jobs[job.folder] = job
        return True  # tells Triton that there is nothing to compile

    hook = triton.knobs.runtime.jit_cache_hook
    with compiling(capability), compilation_target(capability) as target:
        triton.knobs.runtime.jit_cache_hook = record
        try:
            yield jobs
        finally:
            triton.knobs.runtime.jit_cache_hook = hook


def _job(fn: Any, specialization: Specialization, target: GPUTarget) -> CompileJob:
    """The job of one kernel. Its folder is the key that `triton.compile` looks up.

    The key is a digest of Triton itself, the source, the target, options and environment.
    """
    backend = make_backend(target)
    variables = triton.compiler.compiler.get_cache_invalidating_env_vars()
    source, options = specialization.source(fn.jit_function), specialization.parsed_options(backend)
    digest = hashlib.sha256(get_cache_key(source, backend, options, variables).encode()).digest()
    return CompileJob(fn.module, fn.name, specialization.to_json(), base64.b32encode(digest).decode().rstrip("="))


def compile_jobs(
    jobs: list[CompileJob],
    cache: Path,
    capability: int,
    processes: int,
    progress: Callable[[int, int], None] = lambda finished, total: None,
) -> None:
    """Compile `jobs` into Triton's cache directory `cache` in several processes. Calls `progress(finished, total)` after each job.

    Raises RuntimeError with the end of the compiler's output when a job fails.
    """
    pending, finished = iter(jobs), 0

    def work() -> None:
        """One thread: send jobs to a compiler process until none is pending."""
        nonlocal finished
        process = _CompilerProcess(cache, capability)
        try:
            for job in pending:
                process.compile(job)
                finished += 1
                progress(finished, len(jobs))
        finally:
            process.close()

    with ThreadPoolExecutor(max(1, min(processes, len(jobs)))) as pool:
        for future in [pool.submit(work) for _ in range(min(processes, len(jobs)))]:
            future.result()


class _CompilerProcess:
    """A process that compiles one kernel after another. Triton's compiler holds Python's global lock, so threads do not help."""

    def __init__(self, cache: Path, capability: int) -> None:
        variables = {name: value for name, value in env.child_environment(OMP_NUM_THREADS="1").items() if name != "TRITON_INTERPRET"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(cache), str(capability)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=variables,
        )

    def compile(self, job: CompileJob) -> None:
        """Compile one kernel and wait for it. Raises RuntimeError with the end of the process's output when it fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([job.module, job.name, job.specialization]) + "\n")
            self._process.stdin.flush()
        if self._process.stdout.readline() != "compiled\n":
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{job.module}.{job.name} was not compiled: {self._errors.read().decode(errors='replace')[-2000:]}")

    def close(self) -> None:
        """End the process by closing its standard input, and wait for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._errors.close()


def main(cache: Path, capability: int) -> None:
    """Run a compiler process: read one job per line from standard input, compile it, and write the line `compiled`."""
    answers, sys.stdout = sys.stdout, sys.stderr
    triton.knobs.cache.dir = str(cache)
    triton.knobs.compilation.store_binary_only = True
    with compilation_target(capability) as target:
        for line in sys.stdin:
            module, name, text = json.loads(line)
            function: JITFunction = getattr(importlib.import_module(module), name)
            function.device_caches[driver.active.get_current_device()]  # binds function.ASTSource and function.compile
            specialization = Specialization.from_json(text)
            options = specialization.parsed_options(make_backend(target))
            kernel = function.compile(specialization.source(function), target=target, options=options.__dict__)
            build_launcher(LaunchSignature.of(specialization.signature, kernel.metadata._asdict()), cache)
            print("compiled", file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
