"""The leader's view of a follower process: starting and ending it, its reported states, and its log."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.base import env
from stoker.runtime.worker_group.leader_link import send_task

if TYPE_CHECKING:
    from stoker.runtime.worker_group.follower import FollowTask

MAX_LOG_BYTES = 1 << 24  # of the log that is saved after a failure


class FollowerProcess:
    """The process of one follower rank. It has no task at first, and imports what it needs in the meantime."""

    def __init__(self, device: str) -> None:
        """`device`: of the rank, to which the process connects while it waits."""
        self.rank, self.device = -1, device
        self._num_reported = 0
        # Unnamed, so that it disappears with the processes, however they end.
        self._log = tempfile.TemporaryFile(prefix="stoker-rank-")  # noqa: SIM115
        self._connection, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-m", "stoker.runtime.worker_group.follower", device]
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=self._log, stderr=self._log, start_new_session=True, env=env.child_environment()
            )
        except BaseException:
            self._connection.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    def assign(self, task: FollowTask) -> None:
        """Send the process its task, once."""
        self.rank, self.device = task.rank, task.device
        with contextlib.suppress(OSError):  # the process has ended, which the watch thread finds and reports
            send_task(self._connection, msgspec.msgpack.encode(task), task.channel.fd)

    def num_reported(self) -> int:
        """The number of states that the process has reported so far."""
        with contextlib.suppress(OSError):  # nothing more was reported, or the process has ended
            while states := self._connection.recv(64, socket.MSG_DONTWAIT):
                self._num_reported += len(states)
        return self._num_reported

    def log_end(self, max_bytes: int) -> str:
        """The end of the process's output."""
        return self._read_log()[-max_bytes:].decode(errors="replace")

    def kill(self) -> None:
        """Kill the process, wait for it, and close its files."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._connection.close()
        self._log.close()

    def save_log(self, folder: Path) -> None:
        """Write the end of the process's output to a file in `folder`."""
        (folder / f"rank{self.rank}.log").write_bytes(self._read_log())

    def describe_failure(self, reason: str, folder: Path) -> str:
        """The message of a RankError: the reason, the path of the log, and its last line."""
        lines = self._read_log().decode(errors="replace").strip().splitlines()
        last = f" It ends with: {lines[-1]}" if lines else ""
        return f"rank {self.rank} on {self.device} {reason}; its log is {folder / f'rank{self.rank}.log'}.{last}"

    def _read_log(self) -> bytes:
        """The last MAX_LOG_BYTES of the output, read with pread, because the process writes at the file's own position."""
        log = self._log.fileno()
        return os.pread(log, MAX_LOG_BYTES, max(0, os.fstat(log).st_size - MAX_LOG_BYTES))

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process."""
        return (self.process.returncode or 0) < 0

    @property
    def exit_reason(self) -> str:
        """How the process ended: by a signal or with a status."""
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class WaitingFollowers:
    """Follower processes that wait for their tasks, as a context manager that ends those that received none.

    This module imports little, so that an executor starts its followers before its own imports.
    """

    def __init__(self, devices: Iterable[str] = ()) -> None:
        """Start a process for each of `devices`."""
        self._waiting: list[FollowerProcess] = []
        try:
            for device in devices:
                self._waiting.append(FollowerProcess(device))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WaitingFollowers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take(self, device: str) -> FollowerProcess:
        """A process for `device`: the one that was started for it, or a new one."""
        for follower in self._waiting:
            if follower.device == device:
                self._waiting.remove(follower)
                return follower
        return FollowerProcess(device)

    def close(self) -> None:
        """End the processes that still wait."""
        while self._waiting:
            self._waiting.pop().kill()
