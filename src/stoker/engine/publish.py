"""Making an engine directory: it appears whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from stoker.base.errors import EngineError
from stoker.engine.config import EngineConfig, encode
from stoker.engine.reader import CONFIG, is_engine
from stoker.engine.tensor_file import FileRecord

_OLD = ".old"  # after the workspace's name: the engine that is being replaced


def check_free(out: Path, force: bool) -> None:
    """Raise EngineError unless `out` may be written: it is absent, empty, or an engine that `force` replaces."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_engine(out):
        raise EngineError(f"{out} exists and is not an engine.", cure="Name another directory with --output.")
    if not force:
        raise EngineError(f"{out} holds an engine already.", cure="Name another directory, or replace it with --force.")


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A directory beside `out`, gone when the block ends. What dead builds of this machine left there is removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in leftovers(out):
        host, _, process = left.name.removeprefix(_prefix(out)).rpartition("-")
        pid, _, started = process.removesuffix(_OLD).partition(".")
        if host == socket.gethostname() and _start_of(pid) != started:
            shutil.rmtree(left, ignore_errors=True)
    pid = str(os.getpid())
    work = out.with_name(f"{_prefix(out)}{socket.gethostname()}-{pid}.{_start_of(pid)}")
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def leftovers(out: Path) -> list[Path]:
    """Workspaces of builds of `out` that run, or died."""
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(_prefix(out)))


def publish(work: Path, out: Path) -> None:
    """Put the finished directory in its place; an engine that is there goes only when the new one is whole, and on the disk."""
    sync([*work.iterdir(), work])
    if out.exists():
        old = work.with_name(work.name + _OLD)
        out.rename(old)
        work.rename(out)
        shutil.rmtree(old)
    else:
        work.rename(out)
    sync([out.parent])


def sync(paths: Iterable[Path]) -> None:
    """Wait until the contents of files, and the names in directories, are on the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_config(directory: Path, config: EngineConfig) -> None:
    """Write config.json: the file is the old one or the new one, whenever the machine stops."""
    fresh = directory / f"{CONFIG}.new"
    with fresh.open("wb") as file:
        file.write(encode(config))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / CONFIG)


def record(file: Path) -> FileRecord:
    """A small file's size and digest."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        return FileRecord(file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())


def _prefix(out: Path) -> str:
    return f".{out.name}.building-"


def _start_of(pid: str) -> str | None:
    """When a process started, in ticks since the machine did (proc(5)); None: there is none. A restarted container has the same ids."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
