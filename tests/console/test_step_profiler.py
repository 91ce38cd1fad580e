"""Profiles of an executor's steps with the device stubbed: their number, one at a time, and the combination of several ranks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from live_http import until
from stub_runner import INFO, StubRunner, stub_executor

from stoker.base.profile_query import BUSY, ProfileQuery, ProfileResult
from stoker.base.types import SamplingParams
from stoker.runtime import step_profiler
from stoker.runtime.client import Shutdown
from stoker.runtime.request import TokenRequest
from stoker.runtime.step_profiler import StepProfiler, combine
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox


async def test_the_next_steps_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler.tempfile, "gettempdir", lambda: str(tmp_path))
    mailbox = ZmqMailbox(f"ipc://{tmp_path}/executor", INFO)
    executor = stub_executor(mailbox, StubRunner([7] * 600, 0))
    thread = threading.Thread(target=executor.run)
    thread.start()
    client = await ZmqExecutorClient.connect(mailbox.address)
    try:
        none: ProfileResult = await client.profile(5, 0.05)
        assert "no step ran within 0.05 s" in none.error and not list(tmp_path.glob("stoker-profile-*"))
        waiting = asyncio.create_task(client.profile(4, 60))
        await asyncio.sleep(0)
        assert (await client.profile(4, 60)).error == BUSY
        params = SamplingParams(max_tokens=20)
        async for _ in client.generate(TokenRequest(request_id="a", prompt_ids=[5, 6], params=params)):
            pass
        result = await waiting
        assert result.num_steps == 4 and not result.error
        names = [event["name"] for event in json.loads(Path(result.path).read_text())["traceEvents"] if "name" in event]
        assert {"after 0 steps", "after 3 steps"} <= set(names) and "after 5 steps" not in names
        assert (tmp_path / Path(result.path).parent.name).stat().st_mode & 0o777 == 0o700
        shutil.rmtree(Path(result.path).parent)
        assert executor._profile is None, "a step costs as before"
    finally:
        await client.close()
        executor._shutdown = Shutdown(drain=False)
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()


async def test_an_executor_that_ends_while_a_trace_is_written_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trace consists of many small files here, which are written as long as there is a folder."""
    monkeypatch.setattr(step_profiler.tempfile, "gettempdir", lambda: str(tmp_path))
    written = 0

    def export(profile: object, path: str) -> None:
        nonlocal written
        while written < 1_000_000:
            Path(f"{path}{written}").touch()
            written += 1

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", export)
    before = set(threading.enumerate())
    mailbox = ZmqMailbox(f"ipc://{tmp_path}/executor", INFO)
    executor = stub_executor(mailbox, StubRunner([7] * 600, 0))
    thread = threading.Thread(target=executor.run)
    thread.start()
    client = await ZmqExecutorClient.connect(mailbox.address)
    try:
        waiting = asyncio.create_task(client.profile(1, 60))
        async for _ in client.generate(TokenRequest(request_id="a", prompt_ids=[5, 6], params=SamplingParams(max_tokens=4))):
            pass
        await until(lambda: written > 100)
    finally:
        executor._shutdown = Shutdown(drain=False)
        await asyncio.to_thread(thread.join, 30)
        waiting.cancel()
        await client.close()
    await until(lambda: not {each.name for each in set(threading.enumerate()) - before} & {"profile", "profile-combine"})
    assert written < 1_000_000 and not list(tmp_path.glob("stoker-*")) and not caplog.records


def test_the_folder_of_a_killed_executor_with_the_same_process_id_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler.tempfile, "gettempdir", lambda: str(tmp_path))
    stale = step_profiler.trace_folder(os.getpid(), 1)
    stale.mkdir()
    (stale / "rank0.json").write_text("{}")
    profiler = StepProfiler(ProfileQuery("client", 1, 5, 60), 1, [0], "cpu", 0)
    assert list(tmp_path.rglob("*")) == [stale] and stale.stat().st_mode & 0o777 == 0o700
    profiler.stop(0)
    profiler.discard()


def test_traces_of_several_ranks_are_combined(tmp_path: Path) -> None:
    def events(pid: int) -> list[dict[str, object]]:
        return [
            {"ph": "X", "name": "op", "pid": pid, "tid": 1, "ts": 10.0, "dur": 1.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": pid, "ts": 10.0},
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "python"}},
            {"ph": "X", "name": "trace", "pid": "Spans", "ts": 9.0},
        ]

    for rank, base in ((0, 1_000_000), (1, 3_000_000)):
        trace = {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events(100)}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    files = {rank: tmp_path / f"rank{rank}.json" for rank in (0, 1)}
    combined = json.loads(combine(files, tmp_path / "trace.json").read_text())
    first, second = combined["traceEvents"][:4], combined["traceEvents"][4:]
    assert combined["schemaVersion"] == 1 and len(second) == 4
    assert [event["pid"] for event in first] == [100, 100, 100, "rank 0 Spans"]
    assert [event["pid"] for event in second] == [10_000_100, 10_000_100, 10_000_100, "rank 1 Spans"]
    assert (first[0]["ts"], second[0]["ts"]) == (10.0, 2010.0) and (first[1]["id"], second[1]["id"]) == (3, 3 + (1 << 31))
    assert second[2]["args"]["name"] == "rank 1: python"
