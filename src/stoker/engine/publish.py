"""Writes an engine directory so that it appears complete or not at all.

A build works in a hidden directory next to the output (`workspace`), which is renamed when everything in it is on the disk (`publish`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from stoker.base.disk import names_path
from stoker.base.errors import EngineError
from stoker.base.process import start_time
from stoker.engine.config import EngineConfig, encode_engine_config
from stoker.engine.config_file import CONFIG_FILE
from stoker.engine.reader import is_engine

_REPLACED = ".old"  # suffix of a workspace's name: the engine that is being replaced


def check_output(out: Path, force: bool) -> None:
    """Raise EngineError unless `out` may be written: it is absent or empty, or `force` is set and it is an engine."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_engine(out):
        raise EngineError(f"{out} exists and is not an engine.", cure="Name another directory with --output.")
    if not force:
        raise EngineError(f"{out} holds an engine already.", cure="Name another directory, or replace it with --force.")


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Yield a new directory next to `out`, which is removed at the end of the block.

    Workspaces of dead processes on this machine are removed first. Errors of a full disk name `out`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for path in workspaces_of(out):
        host, _, process = path.name.removeprefix(_prefix(out)).rpartition("-")
        pid, _, started = process.removesuffix(_REPLACED).partition(".")
        if host == socket.gethostname() and start_time(pid) != started:
            shutil.rmtree(path, ignore_errors=True)
    own_pid = str(os.getpid())
    work = out.with_name(f"{_prefix(out)}{socket.gethostname()}-{own_pid}.{start_time(own_pid)}")
    work.mkdir()
    try:
        with names_path(out):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def workspaces_of(out: Path) -> list[Path]:
    """The workspaces of all builds of `out`, running or dead."""
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(_prefix(out)))


def publish(work: Path, out: Path) -> None:
    """Move the finished directory `work` to `out`. An engine that it replaces is removed after the new one is on the disk."""
    flush_to_disk([*work.iterdir(), work])
    if out.exists():
        replaced = work.with_name(work.name + _REPLACED)
        out.rename(replaced)
        work.rename(out)
        shutil.rmtree(replaced)
    else:
        work.rename(out)
    flush_to_disk([out.parent])


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Wait until the contents of files, and the entries of directories, are on the disk (fsync)."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_config(directory: Path, config: EngineConfig) -> None:
    """Write config.json atomically: after a crash, the file is the old or the new one."""
    temporary = directory / f"{CONFIG_FILE}.new"
    with temporary.open("wb") as file:
        file.write(encode_engine_config(config))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / CONFIG_FILE)


def _prefix(out: Path) -> str:
    """The beginning of the names of all workspaces of `out`."""
    return f".{out.name}.building-"
