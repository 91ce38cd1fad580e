"""Where compiled kernels are kept: Triton's cache directory on this machine, and a file of an engine that fills it.

A kernel's folder is named by Triton's digest of its source, its specialization, the target and Triton itself, so what does not fit is
never found. An engine carries code for the GPU only: the host libraries of launches are built on the machine that loads them.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import triton

from stoker.base import env
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.kernels.triton.aot import host_launchers as launchers
from stoker.kernels.triton.aot.compiler import Job
from stoker.kernels.triton.aot.host_launchers import Launch

log = get_logger(__name__)

FILE = "kernels.zip"  # of an engine
_INDEX = "index.json"
_MAX_FILE, _MAX_FILES = 64 << 20, 1 << 14
# What zipfile, zlib, msgspec and Triton's reading of types raise for bytes that are not what was written.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError,
)  # fmt: skip
_PLACE = re.compile(r"[A-Z2-7]{52}/[A-Za-z_]\w{0,199}\.(cubin|json)")


@dataclass(slots=True)
class Counts:
    """Kernels that this process loaded, all time."""

    cached: int = 0
    compiled: int = 0
    compile_s: float = 0.0

    def __str__(self) -> str:
        took = f" in {self.compile_s:.1f} s" if self.compiled else ""
        return f"{self.cached} from the cache, {self.compiled} compiled{took}"


counts = Counts()


def use() -> Path:
    """Let Triton keep its kernels in `env.kernel_cache()` and count them; a directory of the process's own where that is not writable."""
    path = env.kernel_cache()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        shown, path = path, Path(_own_folder())
        log.warning("%s can't be written: kernels that the engine does not bring are compiled at every start", shown)
    triton.knobs.cache.dir = str(path)
    triton.knobs.compilation.listener = _count
    return path


_own: list[tempfile.TemporaryDirectory[str]] = []


def _own_folder() -> str:
    if not _own:
        _own.append(tempfile.TemporaryDirectory(prefix="stoker-kernels-"))
    return _own[0].name


def _count(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool) -> None:
    if cache_hit:
        counts.cached += 1
        return
    counts.compiled += 1
    stages = sum(took for _, took in times.lowering_stages)
    counts.compile_s += (times.ir_initialization + stages + times.store_results) / 1e6
    log.debug("compiled %s", metadata["name"])


class Index(msgspec.Struct):
    """What an engine's file says of itself."""

    triton: str
    capability: int
    kernels: int
    launches: list[Launch]


def pack(jobs: Iterable[Job], cache: Path, file: Path, capability: int) -> None:
    """Write the kernels of `jobs`, which are in Triton's cache, to `file`."""
    kept = sorted(jobs, key=lambda job: job.folder)
    launches = {Launch.of(json.loads(job.data)["signature"], _description(cache / job.folder)): None for job in kept}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, _INDEX, msgspec.json.encode(Index(triton.__version__, capability, len(kept), list(launches))))
        for job in kept:
            for path in sorted((cache / job.folder).iterdir()):
                if _PLACE.fullmatch(place := f"{job.folder}/{path.name}") and not path.name.startswith("__grp__"):
                    _add(archive, place, path.read_bytes())


def _description(folder: Path) -> dict[str, Any]:
    """What Triton says of a compiled kernel."""
    return json.loads(next(path for path in folder.glob("*.json") if not path.name.startswith("__grp__")).read_bytes())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Without the time: the same kernels make the same file."""
    archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def unpack(file: Path, cache: Path) -> int:
    """Put an engine's kernels into Triton's cache, where they are not there, and build what launches them. Returns how many were new.

    Raises EngineError for a file that is damaged or names places outside.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as archive:  # in memory no place is one that the system refuses to go to
            index = msgspec.json.decode(_read(archive, _INDEX), type=Index)
            if index.triton != triton.__version__:
                log.info("the engine's kernels were compiled by Triton %s, and this is %s", index.triton, triton.__version__)
                return 0
            fresh = _unpack(archive, cache)
        if fresh:
            launchers.build_all(index.launches, cache)
        return fresh
    except _DAMAGED as problem:
        raise EngineError(f"{file} is damaged ({problem}).", cure="Copy the engine again, or build it again.") from None


def _unpack(archive: zipfile.ZipFile, cache: Path) -> int:
    folders: dict[str, list[str]] = {}
    names = archive.namelist()
    if len(names) > _MAX_FILES:
        raise ValueError(f"{len(names)} files")
    for name in names:
        if name == _INDEX:
            continue
        if not _PLACE.fullmatch(name):
            raise ValueError(f"{name!r} is no place of a kernel")
        folder, _, file = name.partition("/")
        folders.setdefault(folder, []).append(file)
    fresh = [folder for folder in folders if not any((cache / folder).glob("__grp__*.json"))]
    for folder in fresh:
        _place(cache / folder, {file: _read(archive, f"{folder}/{file}") for file in folders[folder]})
    return len(fresh)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MAX_FILE:
        raise ValueError(f"{name} has {archive.getinfo(name).file_size} bytes")
    return archive.read(name)


def _place(folder: Path, files: dict[str, bytes]) -> None:
    """A kernel's files, as Triton would have written them: the list of them last, with their paths here."""
    described = [name for name in files if name.endswith(".json")]
    if len(described) != 1:
        raise ValueError(f"{folder.name} has {len(described)} descriptions")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _write(folder / name, data)
    group = {"child_paths": {name: str(folder / name) for name in files}}
    _write(folder / f"__grp__{described[0]}", json.dumps(group).encode())


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)
