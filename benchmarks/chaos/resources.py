"""What the processes of the server hold: descriptors, threads, memory, shared memory, and blocks of the KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.server import Server

SAMPLE_S = 1.0
QUIET_S = 30.0  # limit for the end of all requests after the load
SPARE = {"descriptors": 4, "threads": 2, "shared_memory": 0, "processes": 0}  # tolerated above the initial values


def held(server: Server) -> dict[str, Any]:
    """Descriptors, threads, processes, memory in KiB (not shared with other processes) and the number of objects in /dev/shm.

    Connections whose other end this process holds are not counted: gRPC keeps channels of cancelled calls open.
    """
    total: dict[str, Any] = {"descriptors": 0, "threads": 0, "processes": 0, "memory_kib": 0}
    own = _connections_from_here()
    for _, pid in [("supervisor", server.process.pid), *server.processes()]:
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            total["descriptors"] += sum(link not in own for link in _links(folder / "fd"))
            total["threads"] += len(list((folder / "task").iterdir()))
            total["processes"] += 1
            lines = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
            total["memory_kib"] += sum(int(lines[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    total["shared_memory"] = len(list(Path("/dev/shm").iterdir()))
    return total


async def quiet(server: Server, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the server holds when no request runs, with the used KV blocks. Waits until all requests have ended.

    With `before`, also waits until it holds no more than that: connections whose client was cancelled end after the keep-alive time.
    """
    deadline = time.monotonic() + QUIET_S
    while True:
        values = await server.metrics()
        used = values.get("stoker_kv_blocks_used", -1.0)
        idle = values.get("stoker_queue_size") == 0 and values.get("stoker_running_sequences") == 0 and used == 0
        if idle or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.25)
    await asyncio.sleep(1.0)  # connections of the clients end
    state = {"kv_blocks": used, "queue": values.get("stoker_queue_size"), "running": values.get("stoker_running_sequences")}
    while leaks(before or {}, found := {**held(server), **state}) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return found


def descriptors(server: Server) -> dict[str, dict[str, int]]:
    """The open descriptors by role and by what they refer to."""
    found: dict[str, Counter[str]] = {}
    sockets = _socket_states()
    for role, pid in [("supervisor", server.process.pid), *server.processes()]:
        counts = found.setdefault(role, Counter())
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(path.readlink())
                counts[sockets.get(name) or re.sub(r"\d+", "N", name)] += 1
    return {role: dict(sorted(counts.items())) for role, counts in found.items()}


def _links(folder: Path) -> list[str]:
    """What the descriptors in /proc/PID/fd refer to. Those that are closed meanwhile are left out."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append(str(path.readlink()))
    return found


def _connections_from_here() -> set[str]:
    """The names of the descriptors of all sockets whose peer is a socket of this process."""
    own, rows = set(_links(Path("/proc/self/fd"))), []
    for table in ("tcp", "tcp6"):
        rows += [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    ports = {row[1].rpartition(":")[2] for row in rows if f"socket:[{row[9]}]" in own}
    return {f"socket:[{row[9]}]" for row in rows if row[2].rpartition(":")[2] in ports}


def _socket_states() -> dict[str, str]:
    """A text about each socket of this machine by the name of its descriptor. Sockets of ended connections are in no table."""
    states = {"01": "established", "08": "closed by the client", "0A": "listening"}
    found = {}
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found |= {f"socket:[{row[9]}]": f"TCP {states.get(row[3], 'ending')}" for row in rows}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    found |= {f"socket:[{row[6]}]": f"Unix {re.sub('[0-9a-z_]{8}', 'X', row[7]) if len(row) > 7 else 'unnamed'}" for row in rows}
    return found


class Sampler:
    """Samples what the server holds until it is stopped."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.samples: list[tuple[float, int]] = []  # time, memory in KiB

    async def run(self) -> None:
        """Sample until the task is cancelled."""
        while True:
            found = await asyncio.to_thread(held, self._server)
            self.samples.append((time.monotonic(), found["memory_kib"]))
            await asyncio.sleep(SAMPLE_S)

    def slope(self, start_s: float, end_s: float) -> float | None:
        """Growth of memory between two times, in MB per minute: Theil-Sen, which a single step or outlier does not change."""
        points = [(at, kib) for at, kib in self.samples if start_s <= at <= end_s]
        points = points[:: max(1, len(points) // 300)]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
        return statistics.median(slopes) * 1024 / 1e6 * 60 if slopes else None


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the server holds above its initial values."""
    names = [name for name in SPARE if name in before and after[name] > before[name] + SPARE[name]]
    found = [f"{name}: {before[name]} before, {after[name]} after" for name in names]
    return found + [f"{name}: {after[name]} after the load" for name in ("kv_blocks", "queue", "running") if after[name] != 0]
