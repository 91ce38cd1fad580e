"""The engines in the cache: lists them, finds them by name or id, and removes them. Free of torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from stoker.base import env
from stoker.base.errors import ConfigError, UnavailableError
from stoker.deploy.engine import read_config
from stoker.deploy.model_name import model_name_of

ID_CHARS = 12  # of a content address, as tables show it
_ADDRESS = re.compile(r"[0-9a-f]{40}")
_ID_PREFIX = re.compile(r"[0-9a-f]{4,40}")


class CachedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the cache."""

    path: str
    id: str  # the first digits of its content address
    name: str  # the name of its model
    checkpoint: str  # the name of its checkpoint: a file name or hub id
    num_bytes: int
    dtype: str
    quantization: str
    device: str
    used_at: float  # seconds since 1970: when it was built, or found in the cache


def engines_folder() -> Path:
    """The folder that contains the cached engines."""
    return env.cache_dir() / "engines"


def cached_engines() -> list[CachedEngine]:
    """All engines in the cache, the most recently used first. Damaged ones are left out."""
    folder = engines_folder()
    if not folder.is_dir():
        return []
    found = [engine for path in folder.iterdir() if _ADDRESS.fullmatch(path.name) and (engine := _describe(path)) is not None]
    return sorted(found, key=lambda engine: -engine.used_at)


def matching_engines(text: str) -> list[CachedEngine]:
    """The cached engines whose model name, checkpoint name or id is `text`. The first digits of an id are sufficient."""
    is_id = _ID_PREFIX.fullmatch(text) is not None
    return [e for e in cached_engines() if text in (e.name, e.checkpoint) or (is_id and Path(e.path).name.startswith(text))]


def find_cached_engine(text: str) -> Path | None:
    """The path of the cached engine with this name or id, or None. Raises ConfigError when there are several."""
    found = matching_engines(text)
    if len(found) > 1:
        ids = ", ".join(f"{engine.id} ({engine.quantization}, {engine.dtype})" for engine in found)
        raise ConfigError(f"{text} is the name of {len(found)} engines: {ids}.", cure=f"Use an id; {found[0].id} was used last.")
    return Path(found[0].path) if found else None


def remove_engine(engine: CachedEngine) -> None:
    """Remove an engine from the cache. Raises UnavailableError while another process builds it."""
    path = Path(engine.path)
    try:
        with FileLock(path.with_name(path.name + ".lock"), timeout=0):
            doomed = path.with_name(f".{path.name}.removed")  # a name that no process looks for, while its files are deleted
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)
    except Timeout:
        raise UnavailableError(f"{engine.name} ({engine.id}) is being built by another process.", cure="Wait for it, or stop it.") from None


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder and its sub-folders in bytes. A file with several hard links counts once, a symbolic link as 0."""
    return sum(file.stat(follow_symlinks=False).st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _describe(path: Path) -> CachedEngine | None:
    """The engine at `path`, or None if it is damaged."""
    config: dict[str, Any] = read_config(path)
    try:
        return CachedEngine(
            path=str(path),
            id=path.name[:ID_CHARS],
            name=model_name_of(path),
            checkpoint=str(config["checkpoint"]["name"]),
            num_bytes=sum(int(record["size"]) for record in config["files"].values()),
            dtype=str(config["dtype"]),
            quantization=str(config["recipe"]["name"]),
            device=str(config["target"]["device"]),
            used_at=path.stat().st_mtime,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return None
