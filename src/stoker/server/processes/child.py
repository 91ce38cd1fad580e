"""The link between the supervisor and one child process: how the task arrives, how readiness is reported, how each detects the other's end.

The parent writes the child's task to its standard input and leaves that open; end of file means that the parent has ended. The child
writes one line to its standard output when it is ready, or when it fails before that. All its other output goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.base import env
from stoker.base.errors import ConfigError, EngineError, StokerError

READY = b"ready\n"
USAGE_STATUS = 2  # exit status of a child that has reported a ConfigError
KILL_AFTER_S = 60.0  # between the stop signal and SIGKILL when the parent has ended
# The stop signal of executors. Slurm and systemd send SIGTERM to all processes of a job or service at once, which the executor ignores,
# because requests in flight have the drain time to end.
EXECUTOR_STOP_SIGNAL = signal.SIGUSR1


class ChildProcess(Protocol):
    """What `Child` needs of a process, as in `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """The standard output of the process."""

    async def wait(self) -> int:
        """Return the exit status when the process has ended."""

    def send_signal(self, number: int) -> None:
        """Send a signal."""


class Child:
    """A child process, as the parent controls it."""

    def __init__(self, name: str, process: ChildProcess, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """`stop_signal`: the signal that makes the process end in an orderly way."""
        self.name = name
        self.process = process
        self.mapped: dict[Path, int] = {}  # files that the process maps into its memory, with their sizes
        self._stop_signal = stop_signal
        self._report = ""
        self._has_reported = asyncio.Event()

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        task: Any,
        arguments: Sequence[str] = (),
        *,
        pass_fds: Sequence[int] = (),
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> Child:
        """Run `python -m module` with `arguments` in its own session, so that Ctrl-C in a terminal sends SIGINT to the parent only."""
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
            env=env.child_environment(**(environment or {})),
        )
        assert process.stdin is not None
        process.stdin.write(encode_task(task))
        return cls(name, process, stop_signal)

    async def ready(self) -> None:
        """Return when the child has reported that it is ready. Never returns if the child ends or reports an error before that."""
        if await self.failure() is not None:
            await asyncio.Event().wait()

    async def failure(self) -> str | None:
        """Wait for the child's report. None: it is ready. Otherwise its error, which is empty if the child ended without a report."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        self._report = "" if line == READY else line.decode().strip()
        self._has_reported.set()
        return None if line == READY else self._report

    async def refusal(self) -> StokerError | None:
        """The error that the child, which has ended, reported instead of becoming ready. Something else must wait for `failure`."""
        await self._has_reported.wait()
        if not self._report:
            return None
        return ConfigError(self._report) if await self.process.wait() == USAGE_STATUS else EngineError(self._report)

    async def stop(self, timeout_s: float) -> None:
        """Send the stop signal, and SIGKILL if the process is still running after `timeout_s`."""
        self.signal(self._stop_signal)
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    @property
    def ending(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self.process.returncode
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with status {code}"
        return f"was killed by {signal.Signals(-code).name}{self._truncated_files() if -code == signal.SIGBUS else ''}"

    def _truncated_files(self) -> str:
        """Names the files of `mapped` that are shorter than at the start, or are missing: reading their pages ends the process."""
        files = [str(path) for path, size in self.mapped.items() if not path.is_file() or path.stat().st_size < size]
        return f", because a file was truncated while it was in use: {', '.join(files)}" if files else ""


def encode_task(task: Any) -> bytes:
    """A task as `receive_task` reads it: its size in 8 bytes, and its pickle."""
    data = pickle.dumps(task)
    return len(data).to_bytes(8, "little") + data


def receive_task() -> tuple[Any, Callable[..., Any]]:
    """In the child: its task, and the function that reports readiness, or an error that is its argument.

    Afterwards, standard output goes to standard error. Ends the process if the parent ends without sending a task.
    """
    status = os.dup(1)
    os.dup2(2, 1)
    size = int.from_bytes(os.read(0, 8), "little")
    data = b""
    while len(data) < size and (chunk := os.read(0, size - len(data))):
        data += chunk
    if not data:
        sys.exit(1)
    return pickle.loads(data), lambda error="": os.write(status, f"{' '.join(error.split())}\n".encode() if error else READY)


def end_with_parent(stop_signal: signal.Signals = signal.SIGTERM) -> None:
    """In the child: start a thread that sends this process its stop signal when the parent has ended, and SIGKILL KILL_AFTER_S later.

    It reads nothing, so that it may start before the task is received: a child that imports does not outlive its parent.
    """

    def wait() -> None:
        """Wait until the parent's end of standard input is closed."""
        poll = select.poll()
        poll.register(0, 0)  # POLLHUP and POLLERR are always reported
        poll.poll()

    _end_after(wait, stop_signal)


def end_at_eof() -> None:
    """Start a thread that sends this process SIGTERM at the end of file of standard input, and SIGKILL KILL_AFTER_S later."""

    def wait() -> None:
        """Read until the end."""
        with contextlib.suppress(OSError):  # a closed descriptor
            while os.read(0, 4096):
                pass

    _end_after(wait, signal.SIGTERM)


def _end_after(wait: Callable[[], None], stop_signal: signal.Signals) -> None:
    """Start a thread that calls `wait`, and then ends this process."""

    def run() -> None:
        """The thread."""
        wait()
        os.kill(os.getpid(), stop_signal)
        threading.Event().wait(KILL_AFTER_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=run, name="parent", daemon=True).start()
