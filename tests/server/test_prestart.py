"""A child process that starts before its task is known."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from stoker.server.processes.child import Child
from stoker.server.processes.prestart import Prestarted

CHILD = """
import signal, sys
from stoker.server.processes.child import receive_task
task, report = receive_task()
report(task if task != "ready" else "")
signal.pause()
"""


IMPORTING_CHILD = """
import signal
from stoker.server.processes.child import end_with_parent
end_with_parent()
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


@pytest.mark.parametrize("data", [b"", b"a task that is not read"])
def test_a_child_that_still_imports_ends_with_its_parent(child: str, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "importing_child.py").write_text(IMPORTING_CHILD)
    prestarted = Prestarted("child", "importing_child")
    process = prestarted._process
    assert process is not None and process.stdin is not None
    process.stdin.write(data)
    process.stdin.close()
    assert process.wait() == -signal.SIGTERM


async def test_a_started_child_that_still_imports_ends_with_its_parent(child: str, tmp_path: Path) -> None:
    (tmp_path / "importing_child.py").write_text(IMPORTING_CHILD)
    started = await Child.start("child", "importing_child", "a task that is not read")
    started.process.stdin.close()  # type: ignore[attr-defined]
    assert await started.process.wait() == -signal.SIGTERM


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
