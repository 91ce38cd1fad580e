"""Where compiled kernels are stored: Triton's cache directory on this machine, and the archive in an engine directory that fills it.

Triton names a kernel's folder by a digest of its source, its specialization, the target and Triton itself, so a kernel that does not match
is never found. The archive holds GPU code only (.cubin) and its description (.json):

    kernels.zip
        index.json                    Triton's version, the compute capability, and the signatures of all launches
        <52 characters>/<name>.cubin  one folder per kernel, named by its cache key
        <52 characters>/<name>.json

The host libraries that launch the kernels are built on the machine that installs the archive (`host_launchers`).
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
from stoker.base.disk import names_path
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.kernels.triton.aot.compiler import CompileJob
from stoker.kernels.triton.aot.host_launchers import LaunchSignature, build_launchers
from stoker.kernels.triton.aot.specialization import Specialization

log = get_logger(__name__)

ARCHIVE = "kernels.zip"  # in the engine directory
_INDEX = "index.json"
_MAX_FILE_BYTES, _MAX_FILES = 64 << 20, 1 << 14
# What zipfile, zlib, msgspec and Triton's parser of argument types raise for a file that was changed.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    msgspec.MsgspecError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    RuntimeError,
)
_KERNEL_FILE = re.compile(r"[A-Z2-7]{52}/[A-Za-z_]\w{0,199}\.(cubin|json)")


@dataclass(slots=True)
class KernelCounts:
    """Kernels that this process has loaded since it started."""

    cached: int = 0  # found in Triton's cache directory
    compiled: int = 0
    compile_s: float = 0.0

    def __str__(self) -> str:
        took = f" in {self.compile_s:.1f} s" if self.compiled else ""
        return f"{self.cached} from the cache, {self.compiled} compiled{took}"


counts = KernelCounts()


def use_kernel_cache() -> Path:
    """Set Triton's cache directory to `env.kernel_cache()` and return it. From then on, `counts` counts the kernels that are loaded.

    Where that directory is not writable, the process uses a temporary one and logs a warning.
    """
    path = env.kernel_cache()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        configured, path = path, Path(_temporary_folder())
        log.warning("%s is not writable: kernels that the engine does not contain are compiled at every start", configured)
    triton.knobs.cache.dir = str(path)
    triton.knobs.compilation.listener = _count
    return path


_temporary: list[tempfile.TemporaryDirectory[str]] = []


def _temporary_folder() -> str:
    """A folder that is removed when the process ends; the same one at each call."""
    if not _temporary:
        _temporary.append(tempfile.TemporaryDirectory(prefix="stoker-kernels-"))
    return _temporary[0].name


def _count(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool) -> None:
    """Add one kernel to `counts`. Triton calls this after each kernel that it compiled or found in its cache."""
    if cache_hit:
        counts.cached += 1
        return
    counts.compiled += 1
    stages = sum(took for _, took in times.lowering_stages)
    counts.compile_s += (times.ir_initialization + stages + times.store_results) / 1e6
    log.debug("compiled %s", metadata["name"])


class ArchiveIndex(msgspec.Struct):
    """The index.json of an archive."""

    triton: str  # version
    capability: int  # 90: sm_90
    kernels: int
    launches: list[LaunchSignature]


def write_archive(jobs: Iterable[CompileJob], cache: Path, file: Path, capability: int) -> None:
    """Write the kernels of `jobs`, which are compiled in Triton's cache directory `cache`, to `file`."""
    ordered = sorted(jobs, key=lambda job: job.folder)
    launches = {LaunchSignature.of(_signature(job), _metadata(cache / job.folder)): None for job in ordered}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, _INDEX, msgspec.json.encode(ArchiveIndex(triton.__version__, capability, len(ordered), list(launches))))
        for job in ordered:
            for path in sorted((cache / job.folder).iterdir()):
                if _KERNEL_FILE.fullmatch(name := f"{job.folder}/{path.name}") and not path.name.startswith("__grp__"):
                    _add(archive, name, path.read_bytes())


def _signature(job: CompileJob) -> dict[str, Any]:
    """The argument types of a job's kernel, by argument name."""
    return Specialization.from_json(job.specialization).signature


def _metadata(folder: Path) -> dict[str, Any]:
    """Triton's JSON description of the compiled kernel in `folder`."""
    return json.loads(next(path for path in folder.glob("*.json") if not path.name.startswith("__grp__")).read_bytes())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Add a file without a time stamp, so that the same kernels always give the same archive."""
    archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def install_archive(file: Path, cache: Path) -> int:
    """Copy the kernels of an engine's archive into Triton's cache directory and build their host libraries.

    Returns the number of kernels that were not there before. Raises EngineError for a file that is damaged or contains paths outside the
    cache directory.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as archive:
            index = msgspec.json.decode(_read_member(archive, _INDEX), type=ArchiveIndex)
            if index.triton != triton.__version__:
                log.info("the engine's kernels were compiled by Triton %s, and this is Triton %s", index.triton, triton.__version__)
                return 0
            fresh = _install_kernels(archive, cache)
        if fresh:
            build_launchers(index.launches, cache)
        return fresh
    except _DAMAGED as problem:
        raise EngineError(f"{file} is damaged ({problem}).", cure="Copy the engine again, or build it again.") from None


def _install_kernels(archive: zipfile.ZipFile, cache: Path) -> int:
    """Copy the kernels that `cache` does not hold yet and return their number. Raises ValueError for an unexpected file name or count."""
    folders: dict[str, list[str]] = {}
    names = archive.namelist()
    if len(names) > _MAX_FILES:
        raise ValueError(f"{len(names)} files")
    for name in names:
        if name == _INDEX:
            continue
        if not _KERNEL_FILE.fullmatch(name):
            raise ValueError(f"{name!r} is not the path of a kernel")
        folder, _, file = name.partition("/")
        folders.setdefault(folder, []).append(file)
    fresh = [folder for folder in folders if not any((cache / folder).glob("__grp__*.json"))]
    for folder in fresh:
        _install_kernel(cache / folder, {file: _read_member(archive, f"{folder}/{file}") for file in folders[folder]})
    return len(fresh)


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The content of one file of the archive. Raises ValueError for one of more than _MAX_FILE_BYTES."""
    if archive.getinfo(name).file_size > _MAX_FILE_BYTES:
        raise ValueError(f"{name} has {archive.getinfo(name).file_size} bytes")
    return archive.read(name)


def _install_kernel(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of one kernel as Triton does. The group file, which lists their paths on this machine, is written last.

    Raises ValueError if there is not exactly one description (.json).
    """
    descriptions = [name for name in files if name.endswith(".json")]
    if len(descriptions) != 1:
        raise ValueError(f"{folder.name} has {len(descriptions)} descriptions")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _write_atomically(folder / name, data)
    group = {"child_paths": {name: str(folder / name) for name in files}}
    _write_atomically(folder / f"__grp__{descriptions[0]}", json.dumps(group).encode())


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a new file beside `path` and rename it, so that no process sees a part of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with names_path(path.parent):
        fresh.write_bytes(data)
        fresh.replace(path)
