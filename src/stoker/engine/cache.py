"""The cache of built engines, by content: each combination of checkpoint and settings is built once per machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from stoker.base import env
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.engine.config import EngineConfig, content_address
from stoker.engine.publish import workspaces_of
from stoker.engine.reader import Engine

log = get_logger(__name__)


def cached_engine(config: EngineConfig, build: Callable[[Path], object]) -> Engine:
    """The cached engine of `config`, built with `build(path)` if there is none.

    `build` must create the whole directory at `path` in one step. One process builds under a file lock, which ends with the process; others
    wait for it. A damaged engine, and the workspaces of killed builds, are removed under the lock.
    """
    path = env.cache_dir() / "engines" / content_address(config)
    if (engine := _open_intact(path)) is not None:
        _mark_used(path)
        return engine
    path.parent.mkdir(parents=True, exist_ok=True)
    with _acquire(FileLock(path.with_name(path.name + ".lock")), path):
        if (engine := _open_intact(path)) is not None:
            return engine
        for stale in [*workspaces_of(path), path]:
            shutil.rmtree(stale, ignore_errors=True)
        build(path)
        return Engine.open(path)


def _mark_used(path: Path) -> None:
    """Set the modification time of a cached engine, by which unused engines are found. Does nothing if the cache is read-only."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _acquire(lock: FileLock, path: Path) -> FileLock:
    """Acquire the lock; log once if another process holds it."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that builds %s", path)
        lock.acquire()
    return lock


def _open_intact(path: Path) -> Engine | None:
    """The engine at `path`, or None if there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        return Engine.open(path)
    except EngineError as problem:
        log.warning("rebuilding the cached engine: %s", problem)
        return None
