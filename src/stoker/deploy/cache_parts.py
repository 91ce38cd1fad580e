"""The parts of the cache directory: their sizes, and the entries that were not used for some time."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from stoker.base import env
from stoker.deploy.cached_engines import folder_bytes

DAY_S = 86400

# Folder of the cache directory: what it contains.
PARTS = {
    "engines": "built engines (stoker list)",
    "sources": "checkpoints fetched from archives, s3:// and https://",
    "checkpoints": "the model of stoker demo",
    "kernels": "compiled GPU kernels",
    "native": "compiled CPU kernels",
    "calibration": "calibrated layers of interrupted builds",
    "digests": "digests of checkpoint files",
    "running": "running servers (stoker ps)",
}
UNLOCKED = ("calibration", "digests")  # parts whose entries have no lock: a build that misses one computes it again
HUB = "hub"


class CachePart(msgspec.Struct, frozen=True, kw_only=True):
    """One folder of the cache."""

    name: str
    path: str
    description: str
    num_entries: int
    num_bytes: int
    is_own: bool = True  # False: the cache of the hub, which other programs share


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file or directory that can be removed."""

    path: str
    num_bytes: int


def cache_parts() -> list[CachePart]:
    """All parts of Stoker's cache, and the cache of the model hub."""
    parts = [_measure(name, folder, text) for name, text in PARTS.items() if (folder := _folder(name)).is_dir()]
    hub = _hub_folder()
    if hub.is_dir():
        description = f"models of the hub, shared with other programs, in {hub}"
        parts.append(msgspec.structs.replace(_measure(HUB, hub, description), is_own=False))
    return parts


def unused_entries(days: int, in_use: set[str]) -> list[CacheEntry]:
    """Entries that were not used for `days` days, largest first: engines except those in `in_use`, fetched sources, checkpoints, saved
    calibrations, digests, and directories that killed processes left.
    """
    cutoff = time.time() - days * DAY_S
    folders = [_folder("engines"), *_children(_folder("sources")), _folder("checkpoints"), _folder("calibration"), _folder("digests")]
    entries = [entry for folder in folders for entry in _children(folder) if entry.suffix != ".lock" and str(entry.resolve()) not in in_use]
    old = [entry for entry in entries if entry.stat(follow_symlinks=False).st_mtime <= cutoff]
    found = [CacheEntry(path=str(entry), num_bytes=_size(entry)) for entry in old]
    return sorted(found, key=lambda entry: -entry.num_bytes)


def remove_entry(entry: CacheEntry) -> bool:
    """Remove a file or directory. Returns False, and leaves it, while another process builds or fetches it."""
    path = Path(entry.path)
    if path.parent.name in UNLOCKED:
        _delete(path)
        return True
    # The lock of an unfinished entry (.NAME.building-*, NAME.partial-*) is that of the finished one.
    is_unfinished = path.name.startswith(".") or ".partial-" in path.name
    name = path.name.removeprefix(".").partition(".")[0] if is_unfinished else path.name
    try:
        with FileLock(path.with_name(name + ".lock"), timeout=0):
            _delete(path)
    except Timeout:
        return False
    return True


def _delete(path: Path) -> None:
    """Remove a file or a directory with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folder(name: str) -> Path:
    """The folder of a part of the cache."""
    return env.kernel_cache() if name == "kernels" else env.cache_dir() / name


def _hub_folder() -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _children(folder: Path) -> list[Path]:
    """The files and directories in a folder; empty if it does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _measure(name: str, folder: Path, description: str) -> CachePart:
    """The number of entries and the size of a part."""
    count = sum(1 for child in folder.iterdir() if child.suffix != ".lock")
    return CachePart(name=name, path=str(folder), description=description, num_entries=count, num_bytes=folder_bytes(folder))


def _size(path: Path) -> int:
    """The size of a file or directory in bytes."""
    return folder_bytes(path) if path.is_dir() and not path.is_symlink() else path.stat(follow_symlinks=False).st_size
