"""The limit of restarts: a frontend that ends each time it is started stops the server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker.server.processes import frontend_group, restart_policy
from stoker.server.processes.child import Child
from stoker.server.processes.frontend_group import MAX_RESTARTS, FrontendGroup
from stoker.server.processes.tasks import FrontendTask
from stoker.server.settings import ServerSettings


async def test_a_frontend_that_ends_at_each_start_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frontend_group, "MODULE", "this")  # a module of Python that ends with status 0
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.0)
    given_up: asyncio.Queue[Child] = asyncio.Queue()
    group = FrontendGroup(FrontendTask("tiny", ServerSettings(), [], run_dir=str(tmp_path)), 2, given_up.put_nowait)
    started, indices = list[Child](), list[int]()
    start_one = group._start_one

    async def count_start(index: int) -> Child:
        started.append(await start_one(index))
        indices.append(index)
        return started[-1]

    monkeypatch.setattr(group, "_start_one", count_start)
    await group.start()
    group.keep_running()
    async with asyncio.timeout(60):
        assert {await given_up.get(), await given_up.get()} == set(group.children)
    assert len(started) == 2 * (1 + MAX_RESTARTS) and sorted(indices) == [0] * (1 + MAX_RESTARTS) + [1] * (1 + MAX_RESTARTS)
    await group.stop(1.0)
