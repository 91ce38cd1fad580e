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
SPARE = {"descriptors": 4, "threads": 2, "shared_memory": 0, "processes": 0, "files": 2}  # tolerated above the initial values
AGE_S = 60.0  # until then, a new process reaches its size: an executor grows by 1.4 MB/min in its first minute, and by 0.2 after it
SLOPE_S = 60.0  # a shorter time has no meaningful slope

Process = tuple[str, int]  # role, process id


def held(server: Server) -> dict[str, Any]:
    """Descriptors, threads, processes, memory in KiB, and the numbers of objects in /dev/shm and of files in the run directory.

    Connections whose other end this process holds are not counted: gRPC keeps channels of cancelled calls open.
    """
    total: dict[str, Any] = {"descriptors": 0, "threads": 0, "processes": 0}
    own = _connections_from_here()
    for _, pid in _processes(server):
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            total["descriptors"] += sum(link not in own for link in _links(folder / "fd"))
            total["threads"] += len(list((folder / "task").iterdir()))
            total["processes"] += 1
    total["memory_kib"] = sum(memory(server).values())
    total["shared_memory"] = len(list(Path("/dev/shm").iterdir()))
    total["files"] = len(_run_files(server))
    return total


def memory(server: Server) -> dict[Process, int]:
    """The memory of each process in KiB that it does not share with others."""
    found = {}
    for role, pid in _processes(server):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            found[role, pid] = sum(int(lines[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return found


def _processes(server: Server) -> list[Process]:
    """All processes of the server."""
    return [("supervisor", server.process.pid), *server.processes()]


def _run_files(server: Server) -> list[str]:
    """The files in the run directory, which the environment of frontends names."""
    for pid in server.pids("frontend"):
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == b"PROMETHEUS_MULTIPROC_DIR":
                    return [path.name for path in Path(value.decode()).iterdir()]
    return []


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
    for role, pid in _processes(server):
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
    """Samples the memory of each process until it is stopped."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.samples: list[tuple[float, dict[Process, int]]] = []  # time, memory in KiB

    async def run(self) -> None:
        """Sample until the task is cancelled."""
        while True:
            found = await asyncio.to_thread(memory, self._server)
            self.samples.append((time.monotonic(), found))
            await asyncio.sleep(SAMPLE_S)

    def growth(self, middle_s: float, end_s: float) -> list[dict[str, Any]]:
        """The growth of processes that run at the end, in MB per minute, and the seconds in which it was measured.

        In the second half, in which no process is replaced, it is that of all processes, and in the first half that of the supervisor,
        which starts the new ones. A process is measured when it is AGE_S old; the growth in less than SLOPE_S is None.
        """
        found = []
        for role, pid in self.samples[-1][1] if self.samples else ():
            points = [(at, kib[role, pid]) for at, kib in self.samples if (role, pid) in kib]
            old_s = points[0][0] + AGE_S
            for half, start_s, stop_s in ((1, old_s, middle_s), (2, max(old_s, middle_s), end_s)):
                if half == 1 and role != "supervisor":
                    continue
                measured = [point for point in points if start_s <= point[0] <= stop_s]
                seconds = round(measured[-1][0] - measured[0][0], 1) if measured else 0.0
                slope = round(_slope(measured), 3) if seconds >= SLOPE_S else None
                found.append({"role": role, "pid": pid, "half": half, "mb_per_min": slope, "seconds": seconds})
        return found


def _slope(points: list[tuple[float, int]]) -> float:
    """The growth of KiB over seconds in MB per minute: Theil-Sen, which a single step or outlier does not change."""
    points = points[:: max(1, len(points) // 300)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
    return statistics.median(slopes) * 1024 / 1e6 * 60


def total_growth(growth: list[dict[str, Any]]) -> float | None:
    """The growth of all processes together, in the half in which it is larger. None if no process was measured long enough."""
    measured = [process for process in growth if process["mb_per_min"] is not None]
    halves = {process["half"] for process in measured}
    return max((round(sum(each["mb_per_min"] for each in measured if each["half"] == half), 3) for half in halves), default=None)


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the server holds above its initial values."""
    names = [name for name in SPARE if name in before and after[name] > before[name] + SPARE[name]]
    found = [f"{name}: {before[name]} before, {after[name]} after" for name in names]
    return found + [f"{name}: {after[name]} after the load" for name in ("kv_blocks", "queue", "running") if after[name] != 0]
