"""Compiles the kernels of an engine during its build, so that no start needs to compile them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.base import env
from stoker.base.cpus import num_cpus
from stoker.base.logging import get_logger
from stoker.engine.reader import Engine

if TYPE_CHECKING:
    from stoker.kernels.triton.aot.compiler import CompileJob

log = get_logger(__name__)

Progress = Callable[[str, int, int], None]


def compile_kernels(path: Path, progress: Progress) -> None:
    """Compile the kernels that the engine at `path` launches on its target, in parallel, and write them to its kernels.zip.

    Requires Triton, but no GPU. Does nothing for a CPU or an unknown compute capability. If the kernels cannot be listed or compiled, a
    warning is logged, and the first start compiles them.
    """
    engine = Engine.open(path)
    capability = target_capability(engine)
    if capability is None or importlib.util.find_spec("triton") is None:
        return
    progress("kernels", 0, 1)
    try:
        _compile(path, capability, progress)
    except RuntimeError as problem:
        log.warning("kernels were not compiled ahead of time, so the first start takes longer: %s", problem)


def _compile(path: Path, capability: int, progress: Progress) -> None:
    """List the kernels, compile the ones that are not in the cache, and write kernels.zip."""
    from stoker.kernels.triton.aot import kernel_cache as cache
    from stoker.kernels.triton.aot.compiler import compile_jobs

    jobs = launches(path, capability)
    folder = cache.use_kernel_cache()
    missing = [job for job in jobs if not job.is_cached(folder)]
    compile_jobs(missing, folder, capability, num_cpus(), lambda done, total: progress("kernels", done, total))
    cache.write_archive(jobs, folder, path / cache.ARCHIVE, capability)
    log.info("kernels: %d for sm_%d, %d of them compiled now", len(jobs), capability, len(missing))


def target_capability(engine: Engine) -> int | None:
    """The compute capability for which kernels are compiled (90: sm_90). None for a CPU, or for "any GPU" on a machine without one."""
    target = engine.config.target
    if target.device != "cuda":
        return None
    if target.compute_capability is not None:
        return int(target.compute_capability.replace(".", ""))
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def launches(path: Path, capability: int) -> list[CompileJob]:
    """The kernels that the engine at `path` launches, as jobs of the compiler.

    They are listed in a separate process, because Triton's compilation target is process-wide. Raises RuntimeError with the last line that
    the process printed.
    """
    from stoker.kernels.triton.aot.compiler import CompileJob

    variables = {name: value for name, value in env.child_environment().items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "stoker.runtime.worker.aot_trace_process", str(path), str(capability)]
    found = subprocess.run(command, env=variables, capture_output=True)
    if found.returncode:
        reason = "".join(found.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise RuntimeError(f"the kernel launches of {path} cannot be listed: {reason}")
    return msgspec.json.decode(found.stdout, type=list[CompileJob])
