"""The servers that run on this machine. Each writes one file to the cache directory and removes it when it stops."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.base import env
from stoker.base.process import start_time


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server process, as it describes itself."""

    pid: int
    process_start: str  # distinguishes it from a later process with the same id
    machine: str  # host name: the cache directory may be on a shared disk
    url: str
    model: str
    engine: str  # directory
    started_at: float  # seconds since 1970


@contextlib.contextmanager
def registered(url: str, model: str, engine: Path) -> Iterator[None]:
    """List this process as a server inside the block. A cache directory that cannot be written is no error."""
    pid = os.getpid()
    server = RunningServer(
        pid=pid, process_start=start_time(pid) or "", machine=socket.gethostname(), url=url, model=model,
        engine=str(engine.resolve()), started_at=time.time(),
    )  # fmt: skip
    file = _folder() / f"{server.machine}-{pid}.json"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(server))
        temporary.replace(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """The servers on this machine that share this cache directory, the oldest first.

    Removes the files of its processes that were killed.
    """
    found = []
    for file in _folder().glob("*.json"):
        try:
            server = msgspec.json.decode(file.read_bytes(), type=RunningServer)
        except (OSError, msgspec.DecodeError):
            continue
        if server.machine != socket.gethostname():
            continue
        if start_time(server.pid) == server.process_start:
            found.append(server)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return sorted(found, key=lambda server: server.started_at)


def _folder() -> Path:
    """Where running servers write their files."""
    return env.cache_dir() / "running"
