"""What a server holds after its processes were killed and started again: objects, descriptors, threads and files do not accumulate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import pytest
from test_executor_restarts import BODY, FRONTEND, STUB, stub, stub_server, wait_for_status
from test_server_processes import ServerProcess

from stoker.base.config import RuntimeConfig
from stoker.server.coordination import Coordinator
from stoker.server.processes.child import Child
from stoker.server.processes.executor_control import ExecutorControl
from stoker.server.processes.tasks import ServedEngine
from stoker.server.settings import ServerSettings

__all__ = ["stub"]

WARM_UP, RESTARTS = 2, 6
NUM_CENSUSES = 10
NUM_CLIENTS = 6  # connections are distributed over the frontends
CENSUS = Path(__file__).parent / "census"


def with_census(folder: Path) -> dict[str, str]:
    """The environment of a server whose processes can write a census."""
    paths = [str(CENSUS), str(CENSUS.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), "CENSUS_DIR": str(folder), "TMPDIR": str(folder)}


async def census(pid: int, folder: Path) -> dict[str, int]:
    """The numbers of a process's objects by type, of its descriptors, and of its threads."""
    path = folder / f"{pid}.json"
    os.kill(pid, signal.SIGUSR2)
    async with asyncio.timeout(30):
        while not path.exists():
            await asyncio.sleep(0.01)
    counts: dict[str, int] = json.loads(path.read_text())
    path.unlink()
    held = {name: len(list(Path(f"/proc/{pid}/{name}").iterdir())) for name in ("fd", "task")}
    return counts | held


async def replace(served: ServerProcess, module: str, pid: int) -> None:
    """Kill a process, wait until the server is ready with a new one, and send NUM_CLIENTS requests."""
    others = set(served.children(module))
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while not set(served.children(module)) - others:
            await asyncio.sleep(0.01)
    for _ in range(NUM_CLIENTS):
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            await wait_for_status(client, 200)
            assert (await client.post("/v1/completions", json={**BODY, "max_tokens": 4})).status_code == 200


async def lowest(pid: int, folder: Path) -> dict[str, int]:
    """The lowest numbers of NUM_CENSUSES censuses: connections that end, and others that exist for a moment, are in few of them."""
    counts = [await census(pid, folder) for _ in range(NUM_CENSUSES)]
    return {name: min(each.get(name, 0) for each in counts) for name in counts[0]}


async def check_growth(pid: int, folder: Path, before: dict[str, int], between: dict[str, int]) -> None:
    """Fail if the process continues to hold something more often than between the two rounds of restarts, and did so after the first, too.

    What a process creates once at some time is found in one round only.
    """
    leaks = {name for name, count in between.items() if count - before.get(name, 0) >= RESTARTS}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while leaks:
                now = await census(pid, folder)
                leaks = {name for name in leaks if now.get(name, 0) - between[name] >= RESTARTS}
                await asyncio.sleep(0.05)
    assert not leaks, f"process {pid} holds more {', '.join(leaks)} after each of {RESTARTS} restarts"


@pytest.mark.slow
async def test_restarts_of_the_executor(stub: Path) -> None:
    async with stub_server(stub, restarts=100, num_frontends=2, environment=with_census(stub)) as (served, _):
        survivors = [served.process.pid, *served.children(FRONTEND)]
        counts = []
        for restarts in (WARM_UP, RESTARTS, RESTARTS):
            for _ in range(restarts):
                await replace(served, STUB, served.children(STUB)[0])
            counts.append([await lowest(pid, stub) for pid in survivors])
        for pid, before, between in zip(survivors, counts[0], counts[1], strict=True):
            await check_growth(pid, stub, before, between)


async def test_restarts_of_frontends(stub: Path) -> None:
    """Files do not accumulate either: a new frontend continues the counters of the one that was killed, and no count is lost."""
    async with stub_server(stub, num_frontends=2, environment=with_census(stub)) as (served, _):
        (folder,) = stub.glob("stoker-*")

        async def counted(number: int) -> None:
            """Wait until the frontends report this number of requests. They write their counters every 0.25 s."""
            line = f'stoker_requests_total{{model="tiny",outcome="length"}} {number}.0\n'
            async with asyncio.timeout(10), httpx.AsyncClient(base_url=served.url, timeout=30) as client:
                while line not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.02)

        counts, files, kills = [], [], 0
        for restarts in (WARM_UP, RESTARTS, RESTARTS):
            for _ in range(restarts):
                await replace(served, FRONTEND, sorted(served.children(FRONTEND))[0])  # the older one of both
                kills += 1
                await counted(NUM_CLIENTS * kills)
            counts.append(await lowest(served.process.pid, stub))
            files.append(sum(path.is_file() for path in folder.rglob("*")))
        assert files[1:] == files[:1] * 2
        await check_growth(served.process.pid, stub, counts[0], counts[1])


async def test_the_sockets_of_former_executors_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each time a model is loaded, its executor has another socket, which stays if the process is killed."""
    served = ServedEngine(engine=tmp_path, tokenizer=tmp_path, runtime=RuntimeConfig(), settings=ServerSettings())

    def ignore(_: object) -> None:
        """Replaces the supervisor's functions."""

    control = ExecutorControl(served, tmp_path, Coordinator(), None, ignore, ignore, ignore)

    async def start() -> Child:
        """Replaces the process, which would create the socket."""
        Path(control.address.removeprefix("ipc://")).touch()
        return Child("executor", AsyncMock())

    monkeypatch.setattr(control, "_start", start)
    addresses = {(await control.launch(), control.address)[1] for _ in range(3)}
    assert len(addresses) == 3 and [f"ipc://{path}" for path in tmp_path.iterdir()] == [control.address]
