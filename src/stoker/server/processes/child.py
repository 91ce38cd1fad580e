"""A process of the server, seen from both sides: what it is told when it starts, what it tells, and how both notice an end.

The parent writes the child's task to its standard input and leaves that open: its end means that the parent is gone. The child
writes one line to its standard output when it is ready; whatever else it prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from stoker.base import env

READY = b"ready\n"


class Child:
    """The parent's side."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        task: Any,
        *,
        pass_fds: Sequence[int] = (),
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Run `python -m module` in a session of its own, so that a terminal's Ctrl-C reaches the parent alone."""
        process = await asyncio.create_subprocess_exec(
            python, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=pass_fds,
            start_new_session=True, env=env.child_environment(**(environment or {})),
        )  # fmt: skip
        assert process.stdin is not None
        data = pickle.dumps(task)
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        return cls(name, process)

    async def ready(self) -> None:
        """Returns once the child says that it is ready; never, if it ends before."""
        assert self.process.stdout is not None
        if await self.process.stdout.readline() != READY:
            await asyncio.Event().wait()

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end; end it when it has not after `timeout_s`."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def receive_task() -> tuple[Any, Callable[[], Any]]:
    """The child's side: its task, and what to call when it is ready. From here on, prints go to standard error."""
    status = os.dup(1)
    os.dup2(2, 1)
    size = int.from_bytes(os.read(0, 8), "little")
    data = b""
    while len(data) < size and (piece := os.read(0, size - len(data))):
        data += piece
    return pickle.loads(data), lambda: os.write(status, READY)


def end_with_parent() -> None:
    """Send SIGTERM to this process when the parent is gone, and SIGKILL when that did not help."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
