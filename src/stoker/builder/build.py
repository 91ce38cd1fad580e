"""Builds an engine: prepare, convert, write, verify, publish. The directory appears complete or not at all."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from stoker.base.config import check_choice
from stoker.builder.background_compile import CompileKernels, Progress, compile_in_background
from stoker.builder.build_plan import BuildPlan
from stoker.builder.calibration.calibrate import discard_saved_layers
from stoker.builder.config import VERIFY, BuildConfig
from stoker.builder.prepare import add_fingerprint, prepare
from stoker.builder.verification.verify import verify_engine
from stoker.builder.write import record_new_files, write_engine
from stoker.engine.cache import cached_engine
from stoker.engine.publish import check_output, flush_to_disk, publish, workspace, write_config
from stoker.engine.reader import Engine


def build(
    source: str | Path,
    out: str | Path,
    config: BuildConfig = BuildConfig(),
    *,
    name: str | None = None,
    force: bool = False,
    verify: str = "auto",
    progress: Progress | None = None,
    kernels: CompileKernels | None = None,
) -> Engine:
    """Build the engine of checkpoint `source` in directory `out`.

    Args:
        source: A checkpoint directory or a GGUF file.
        out: The engine directory.
        config: The settings of the engine.
        name: Name of the checkpoint, such as its hub id. Default: the name of the path.
        force: Replace an engine in `out`.
        verify: `files` reads back what was written; `auto` also compares greedy tokens with the checkpoint's, and measures accuracy, where
            that is quick; `full` always does; `none` does nothing.
        progress: Receives (stage, done, total) from several threads. Bytes for reading and for weights, otherwise steps.
        kernels: Compiles kernels ahead of time, to be added to the engine: `runtime.ahead.compile_ahead`.

    Raises:
        CheckpointError, ConfigError or EngineError. `out` is not changed then.
    """
    check_choice("verify", verify, VERIFY)
    out = Path(out)
    check_output(out, force)
    progress = progress or _no_progress
    plan = add_fingerprint(prepare(source, config, name), progress)
    return _build(plan, out, verify, progress, kernels, force=force)


def build_cached(
    source: str | Path,
    config: BuildConfig = BuildConfig(),
    *,
    name: str | None = None,
    verify: str = "auto",
    progress: Progress | None = None,
    kernels: CompileKernels | None = None,
) -> Engine:
    """The engine of `source` from the cache. It is built there if necessary. Arguments and exceptions are those of `build`."""
    check_choice("verify", verify, VERIFY)
    progress = progress or _no_progress
    plan = add_fingerprint(prepare(source, config, name), progress)
    return cached_engine(plan.config, lambda path: _build(plan, path, verify, progress, kernels, force=True))


def _build(plan: BuildPlan, out: Path, verify: str, progress: Progress, kernels: CompileKernels | None, *, force: bool) -> Engine:
    """Convert, write, verify and publish one engine. Kernels are compiled, and files are flushed to the disk, in background threads."""
    with workspace(out) as work, ThreadPoolExecutor(1, "disk") as disk, compile_in_background(plan, kernels, progress) as compiled:
        written = write_engine(plan, work, progress)
        flushed = disk.submit(flush_to_disk, [work / name for name in written.files])
        checks = verify_engine(plan, work, verify, progress) if verify != "none" else {}
        for file in compiled():
            shutil.move(file, work / file.name)
        write_config(work, msgspec.structs.replace(written, checks=checks, files=record_new_files(work, written.files)))
        check_output(out, force)  # again: another build may have written it in the meantime
        flushed.result()
        publish(work, out)
    discard_saved_layers(plan)
    return Engine.open(out)


def _no_progress(stage: str, done: int, total: int) -> None:
    """Ignores progress reports."""
