"""Engines kept by content: the same checkpoint and the same settings are built once on a machine, however many processes ask."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from stoker.base import env
from stoker.base.errors import EngineError
from stoker.base.logging import get_logger
from stoker.engine.config import EngineConfig, address
from stoker.engine.publish import leftovers
from stoker.engine.reader import Engine

log = get_logger(__name__)


def cached_engine(config: EngineConfig, make: Callable[[Path], object]) -> Engine:
    """The engine of `config`, made by `make(path)` when the cache has none.

    `make` must put a whole directory at `path` in one step. One process makes it, under a lock that ends with the process; the others
    wait for it. A directory that is damaged, and what killed builds left, is removed under the lock.
    """
    path = env.cache_dir() / "engines" / address(config)
    if (engine := _whole(path)) is not None:
        return engine
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(path.name + ".lock"))
    with _acquired(lock, path):
        if (engine := _whole(path)) is not None:
            return engine
        for left in [*leftovers(path), path]:
            shutil.rmtree(left, ignore_errors=True)
        make(path)
        return Engine.open(path)


def _acquired(lock: FileLock, path: Path) -> FileLock:
    """The lock, held. Says so once when another process has it."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that builds %s", path)
        lock.acquire()
    return lock


def _whole(path: Path) -> Engine | None:
    """The engine at `path`, or None when there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        return Engine.open(path)
    except EngineError as problem:
        log.warning("the cached engine is built again: %s", problem)
        return None
