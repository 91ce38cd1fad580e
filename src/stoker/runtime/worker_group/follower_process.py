"""The leader's view of a follower process: starting and ending it, its reported states, and its log."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stoker.base import env
from stoker.runtime.worker_group.follower import FollowTask

MAX_LOG_BYTES = 1 << 24  # of the log that is saved after a failure


class FollowerProcess:
    """The process of one follower rank."""

    def __init__(self, task: FollowTask, pass_fds: tuple[int, ...]) -> None:
        self.rank, self.device = task.rank, task.device
        self._num_reported = 0
        # Unnamed, so that it disappears with the processes, however they end.
        self._log = tempfile.TemporaryFile(prefix="stoker-rank-")  # noqa: SIM115
        self._status, theirs = os.pipe()
        task.status_fd = theirs
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stoker.runtime.worker_group.follower"], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
                bufsize=0, pass_fds=(*pass_fds, theirs), start_new_session=True, env=env.child_environment(),
            )  # fmt: skip
        except BaseException:
            os.close(self._status)
            self._log.close()
            raise
        finally:
            os.close(theirs)
        data = msgspec.msgpack.encode(task)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which the watch thread finds and reports
            self.process.stdin.write(len(data).to_bytes(8, "little") + data)

    def num_reported(self) -> int:
        """The number of states that the process has reported so far."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        while any(event & select.POLLIN for _, event in poll.poll(0)) and (states := os.read(self._status, 64)):
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
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self._status)
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
