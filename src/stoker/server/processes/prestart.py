"""A child process that is started before its task is known, so that it imports what it needs while the parent prepares the task."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from stoker.base import env
from stoker.server.processes.child import Child, encode_task


class Prestarted:
    """A running child process without a task. It is started without an event loop, and `adopt` gives it its task within one."""

    def __init__(self, name: str, module: str, stop_signal: signal.Signals = signal.SIGTERM, arguments: Sequence[str] = ()) -> None:
        """Run `python -m module` with `arguments`."""
        self._name, self._stop_signal = name, stop_signal
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
            env=env.child_environment(),
        )  # fmt: skip

    @property
    def is_waiting(self) -> bool:
        """Whether the process runs and has no task yet."""
        return self._process is not None and self._process.poll() is None

    async def adopt(self, task: Any) -> Child:
        """Send the process its task. From now on it is the child that is returned, and `close` has no effect."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `Child` reports
            process.stdin.write(encode_task(task))  # less than the pipe holds: it is read after the imports
        return Child(self._name, await AdoptedProcess.connect(process), self._stop_signal)

    def close(self) -> None:
        """End the process, unless it has been given a task."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


class AdoptedProcess:
    """A process of `subprocess` with the interface of `asyncio.subprocess.Process` that `Child` uses."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self.pid = process.pid
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._wait, name="adopted-child", daemon=True).start()

    @classmethod
    async def connect(cls, process: subprocess.Popen[bytes]) -> AdoptedProcess:
        """Read the output of `process` in the running event loop, and wait for its end in a thread."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        return cls(process, reader)

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return the exit status when the process has ended."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def _wait(self) -> None:
        """The thread: wait for the end of the process."""
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(self._ended.set_result, code)
