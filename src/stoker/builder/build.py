"""The build: checkpoint in, engine directory out, nothing half-made in between."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from stoker.base.config import check_choice
from stoker.builder.calibration.calibrate import Calibrated, calibrate, forget, needs_calibration, work_device
from stoker.builder.calibration.text import calibration_windows
from stoker.builder.config import VERIFY, BuildConfig
from stoker.builder.conversion.convert import convert, stored_tensors
from stoker.builder.conversion.shard_plan import RankShare, file_order
from stoker.builder.generation_config import write_generation
from stoker.builder.prepare import Prepared, prepare, quantizes
from stoker.builder.tokenizers.write import write_tokenizer
from stoker.builder.verification.accuracy import check_accuracy
from stoker.builder.verification.greedy_tokens import Greedy, verify_files, verify_tokens
from stoker.engine.cache import cached_engine
from stoker.engine.config import EngineConfig, rank_metadata
from stoker.engine.publish import check_free, publish, record, sync, workspace, write_config
from stoker.engine.reader import CONFIG, Engine, rank_file
from stoker.engine.tensor_file import PINNED_BYTES, FileRecord, TensorFileWriter, num_bytes

# (what is being done, how much is done, of how much): bytes for what is read and for weights, else steps. Called from several threads.
Progress = Callable[[str, int, int], None]
# Compiles the kernels of the engine whose config.json is in a directory, and adds a file with them.
CompileKernels = Callable[[Path, Progress], None]


def build(
    source: str | Path,
    out: str | Path,
    config: BuildConfig = BuildConfig(),
    *,
    force: bool = False,
    verify: str = "auto",
    progress: Progress | None = None,
    kernels: CompileKernels | None = None,
) -> Engine:
    """Build the engine of checkpoint `source` in directory `out`, which appears whole or not at all.

    `force` replaces an engine that is there. `verify`: files (re-read what was written), auto (and compare greedy tokens with the
    checkpoint's where that is quick), full (compare always), none. `kernels`: `runtime.ahead.compile_kernels`, where the engine is to
    bring compiled kernels along. Raises CheckpointError, ConfigError or EngineError; `out` is untouched then.
    """
    check_choice("verify", verify, VERIFY)
    out = Path(out)
    check_free(out, force)
    progress = progress or _silent
    return _carry_out(prepare(source, config).with_fingerprint(progress), out, verify, progress, kernels, force=force)


def build_cached(
    source: str | Path,
    config: BuildConfig = BuildConfig(),
    *,
    verify: str = "auto",
    progress: Progress | None = None,
    kernels: CompileKernels | None = None,
) -> Engine:
    """The engine of `source` from the cache, built there first when it is not. Raises as `build` does."""
    check_choice("verify", verify, VERIFY)
    progress = progress or _silent
    prepared = prepare(source, config).with_fingerprint(progress)
    return cached_engine(prepared.config, lambda path: _carry_out(prepared, path, verify, progress, kernels, force=True))


def _carry_out(prepared: Prepared, out: Path, verify: str, progress: Progress, kernels: CompileKernels | None, *, force: bool) -> Engine:
    with workspace(out) as work, ThreadPoolExecutor(1, "disk") as disk, _compiling(prepared, kernels, progress) as compiled:
        written = _write(prepared, work, progress)
        on_disk = disk.submit(sync, [work / name for name in written.files])  # as long as the disk takes; what is left to do needs no disk
        checks = _check(prepared, work, verify, progress) if verify != "none" else {}
        for file in compiled():
            shutil.move(file, work / file.name)
        write_config(work, msgspec.structs.replace(written, checks=checks, files=_files(work, written.files)))
        check_free(out, force)  # another build may have been faster
        on_disk.result()
        publish(work, out)
    forget(prepared)
    return Engine.open(out)


class _Abandoned(Exception):
    """The build failed elsewhere."""


@contextmanager
def _compiling(prepared: Prepared, kernels: CompileKernels | None, progress: Progress) -> Iterator[Callable[[], list[Path]]]:
    """Compile the kernels beside everything else: they follow from the engine's config, and processes of their own do it.

    Gives what waits for the files that were made. A build that fails meanwhile ends it after the kernels that are being compiled.
    """
    if kernels is None:
        yield list
        return
    is_abandoned = threading.Event()

    def told(stage: str, done: int, total: int) -> None:
        if is_abandoned.is_set():
            raise _Abandoned
        progress(stage, done, total)

    with tempfile.TemporaryDirectory(prefix="stoker-kernels-") as folder, ThreadPoolExecutor(1, "kernels") as pool:
        beside = Path(folder)
        write_config(beside, msgspec.structs.replace(prepared.config, weights="dummy", files={}))
        compiling = pool.submit(kernels, beside, told)

        def compiled() -> list[Path]:
            compiling.result()
            return [file for file in beside.iterdir() if file.name != CONFIG]

        try:
            yield compiled
        finally:
            is_abandoned.set()


def _write(prepared: Prepared, work: Path, progress: Progress) -> EngineConfig:
    """Write every file of the engine into `work`, config.json last."""
    checkpoint, asked = prepared.checkpoint, prepared.build
    files: dict[str, FileRecord] = {}
    # A dummy build needs no tokenizer: a config.json alone is enough.
    if not asked.dummy_weights or asked.tokenizer is not None or (checkpoint.path / "tokenizer.json").is_file():
        write_tokenizer(checkpoint, asked.tokenizer, work, trust_remote_code=asked.trust_remote_code)
    write_generation(checkpoint, work)
    files |= {file.name: record(file) for file in sorted(work.iterdir())}
    if not asked.dummy_weights:
        files |= _write_weights(prepared, work, progress)
    done = msgspec.structs.replace(prepared.config, files=files)
    write_config(work, done)
    return done


def _files(work: Path, known: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Those of the engine: what was recorded as it was written, and what came to `work` since."""
    new = {file.name: record(file) for file in sorted(work.iterdir()) if file.name not in known and file.name != CONFIG}
    return dict(known) | new


def _write_weights(prepared: Prepared, work: Path, progress: Progress) -> dict[str, FileRecord]:
    """Stream the tensors to the ranks' files: each is made once, whole, and every rank's part of it is written at once."""
    config, checkpoint = prepared.config, prepared.checkpoint
    dtype: torch.dtype = getattr(torch, config.dtype)
    shares = {rank_file(rank): RankShare(config, rank) for rank in range(config.mapping.world_size)}
    specs = file_order(config)
    calibrated = _calibrated(prepared, work, progress)
    total, done = sum(num_bytes(part.shape, part.dtype) for s in specs for part in stored_tensors(s, config.recipe, dtype).values()), 0
    with ExitStack() as stack:
        writers = {
            file: stack.enter_context(
                TensorFileWriter(work / file, share.layouts(), rank_metadata(config, rank), PINNED_BYTES // len(shares))
            )
            for rank, (file, share) in enumerate(shares.items())
        }
        for spec in specs:
            parts = {file: share.of(spec) for file, share in shares.items()}
            for name, tensor in convert(
                spec, prepared.makings, checkpoint.weights, config.model, config.recipe, dtype, calibrated, work_device(prepared)
            ):
                for file in shares:
                    if name in parts[file]:
                        writers[file].write(name, shares[file].cut(spec, name, tensor))
                done += tensor.numel() * tensor.element_size()
                progress("weights", done, total)
        return {file: writer.finish() for file, writer in writers.items()}


def _calibrated(prepared: Prepared, work: Path, progress: Progress) -> Calibrated | None:
    """The layers as calibration quantized them; None when nothing is measured."""
    if not needs_calibration(prepared):
        return None
    asked = prepared.build
    length = min(asked.calibration_seq_len, prepared.config.model.max_positions)
    return calibrate(prepared, calibration_windows(work, asked.calibration_data, asked.calibration_size, length), progress)


def _check(prepared: Prepared, work: Path, verify: str, progress: Progress) -> dict[str, Any]:
    """Verify what was written. Returns the findings."""
    config = prepared.config
    planned = [RankShare(config, rank).layouts() for rank in range(config.mapping.world_size)]
    progress("verify", 0, 2)
    with ThreadPoolExecutor(1, "verify") as pool:
        files = pool.submit(verify_files, work, planned)
        try:
            found = _measure(prepared, work, verify, progress) if verify != "files" else {}
        finally:
            files.result()  # a damaged file is what is told, whatever else it led to
    progress("verify", 2, 2)
    return {"files": "digests and tensors as planned"} | found


def _measure(prepared: Prepared, work: Path, verify: str, progress: Progress) -> dict[str, Any]:
    """How the engine in `work` does beside its checkpoint."""
    config = prepared.config
    found: dict[str, Any] = {"greedy": msgspec.to_builtins(_compare(prepared, work, ask=verify == "full"))}
    progress("verify", 1, 2)
    if quantizes(config.recipe):
        # The files of several ranks hold parts: what calibration finished is read again.
        whole = _calibrated(prepared, work, progress) if config.mapping.world_size > 1 else None
        accuracy = check_accuracy(prepared, work, ask=verify == "full", progress=progress, calibrated=whole)
        found["accuracy"] = msgspec.to_builtins(accuracy)
    return found


def _compare(prepared: Prepared, work: Path, *, ask: bool) -> Greedy:
    if prepared.build.changes_positions:
        return Greedy(skipped="the rotary settings are not the checkpoint's")
    return verify_tokens(work, prepared.checkpoint, ask=ask, trust_remote_code=prepared.build.trust_remote_code)


def _silent(stage: str, done: int, total: int) -> None:
    pass
