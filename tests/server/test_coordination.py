"""Coordination over the supervisor's socket: changes reach all frontends before an action returns, and failures end calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_service import ScriptedService, make_context

from stoker.base.errors import ConfigError, UnavailableError
from stoker.server.processes.coordinator import FrontendCoordination, SupervisorCoordinator
from stoker.server.protocols.kserve.core import Core
from stoker.server.protocols.kserve.errors import TritonError


@contextlib.asynccontextmanager
async def connected(run_dir: Path, number: int) -> AsyncIterator[tuple[SupervisorCoordinator, list[FrontendCoordination]]]:
    supervisor = SupervisorCoordinator()
    server = await supervisor.listen(run_dir)
    frontends = [await FrontendCoordination.connect(str(run_dir)) for _ in range(number)]
    try:
        yield supervisor, frontends
    finally:
        for frontend in frontends:
            await frontend.close()
        server.close()


async def test_a_change_is_applied_everywhere_before_its_action_returns(tmp_path: Path) -> None:
    async with connected(tmp_path, 3) as (supervisor, frontends):
        applied: list[int] = []
        release = asyncio.Event()

        async def apply_slowly(changes: dict[str, Any]) -> None:
            await release.wait()
            applied.append(len(changes))

        frontends[2].on_change(apply_slowly)
        putting = asyncio.create_task(frontends[0].put("a/1", b"value"))
        await asyncio.wait_for(_until(lambda: "a/1" in frontends[1].values), 10)
        assert not putting.done(), "one frontend has not applied the change"
        release.set()
        assert await putting and applied == [1]
        assert await frontends[1].put("a/1", b"other") is False
        assert await frontends[1].put("b", 2)
        assert all(dict(frontend.values) == {"a/1": b"value", "b": 2} for frontend in frontends)
        late = await FrontendCoordination.connect(str(tmp_path))
        assert dict(late.values) == dict(supervisor.values) == {"a/1": b"value", "b": 2}
        await late.close()
        await frontends[0].remove("a/")
        assert all(dict(frontend.values) == {"b": 2} for frontend in frontends)


async def test_a_frontend_that_ends_or_fails_does_not_block_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(tmp_path, 3) as (_, frontends):

        async def apply_never(changes: dict[str, Any]) -> None:
            await asyncio.Event().wait()

        async def fail(changes: dict[str, Any]) -> None:
            raise RuntimeError("apply failed")

        frontends[1].on_change(apply_never)
        frontends[2].on_change(fail)
        putting = asyncio.create_task(frontends[0].put("a", 1))
        await asyncio.wait_for(_until(lambda: "a" in frontends[1].values), 10)
        await frontends[1].close()
        assert await asyncio.wait_for(putting, 10)
        assert "a change of a failed" in caplog.text


async def test_errors_of_actions_and_the_end_of_the_supervisor(tmp_path: Path) -> None:
    async with connected(tmp_path, 1) as (supervisor, frontends):

        async def fail() -> None:
            raise ValueError("reason")

        async def hang() -> None:
            await asyncio.Event().wait()

        supervisor.actions |= {"fail": fail, "hang": hang}
        with pytest.raises(UnavailableError, match="fail failed: reason"):
            await frontends[0].call("fail")
        hanging = asyncio.create_task(frontends[0].call("hang"))
        await asyncio.sleep(0)
        await supervisor.close()
        with pytest.raises(UnavailableError, match="the server is stopping"):
            await asyncio.wait_for(hanging, 10)


async def test_a_request_is_cancelled_by_its_id_in_any_frontend(tmp_path: Path) -> None:
    async with connected(tmp_path, 2) as (_, frontends):
        cores = []
        for frontend in frontends:
            context = msgspec.structs.replace(await make_context(ScriptedService("abc")), coordination=frontend)
            cores.append(Core(context))
        ended: list[str] = []
        with cores[0].in_flight.running("mine", lambda: ended.append("mine")):
            await cores[1].in_flight.cancel("other")
            assert ended == []
            await cores[1].in_flight.cancel("mine")
            assert ended == ["mine"]
        with pytest.raises(TritonError, match="stop requires the request_id"):
            await cores[1].in_flight.cancel("")


async def test_a_folder_whose_path_is_too_long_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is longer than 107 bytes"):
        await SupervisorCoordinator().listen(tmp_path / ("x" * 100))


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)
