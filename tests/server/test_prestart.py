"""A child process that starts before its task is known."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from stoker.server.processes.prestart import Prestarted

CHILD = """
import signal, sys
from stoker.server.processes.child import receive_task
task, report = receive_task()
report(task if task != "ready" else "")
signal.pause()
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "prestarted_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "prestarted_child"


def test_a_child_receives_its_task_and_is_controlled(child: str) -> None:
    async def run() -> None:
        for task, failure in (("ready", None), ("a reason", "a reason")):
            prestarted = Prestarted("child", child)
            assert prestarted.is_waiting
            adopted = await prestarted.adopt(task)
            assert not prestarted.is_waiting and await adopted.failure() == failure and adopted.process.returncode is None
            prestarted.close()  # has no effect
            assert adopted.ending == "is running"
            await adopted.stop(30.0)
            assert adopted.process.returncode == -signal.SIGTERM and adopted.ending == "was killed by SIGTERM"

    asyncio.run(run())


def test_a_child_that_ends_before_its_task(child: str) -> None:
    async def run() -> None:
        prestarted = Prestarted("child", "no_such_module")
        assert prestarted._process is not None
        prestarted._process.wait()
        assert not prestarted.is_waiting
        adopted = await prestarted.adopt("ready")
        assert await adopted.failure() == "" and await adopted.process.wait() == 1

    asyncio.run(run())


def test_a_child_without_a_task_ends_silently(child: str) -> None:
    prestarted = Prestarted("child", child)
    process = prestarted._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert process.wait() == 1
    other = Prestarted("child", child)
    process = other._process
    other.close()
    assert process is not None and process.returncode == -signal.SIGKILL and not other.is_waiting
