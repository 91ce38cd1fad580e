"""Runs a command in a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 55.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A running command. `output`: everything that it has written; `arrivals`: when each part of it arrived, in seconds since the start."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid, self._descriptor = pid, descriptor
        self._started = time.monotonic()
        self.output = ""
        self.arrivals: list[float] = []
        self.status: int | None = None

    @property
    def text(self) -> str:
        """The output without escape sequences."""
        return ESCAPES.sub("", self.output)

    def wait_for(self, text: str) -> None:
        """Read until the output since the last `send` contains `text`."""
        while text not in self.text:
            if not self._read():
                raise AssertionError(f"{text!r} is not in the output: {self.text[-2000:]!r}")

    def send(self, text: str) -> None:
        """Type `text`. The output so far is discarded."""
        self.output = ""
        os.write(self._descriptor, text.encode())

    def wait(self) -> int:
        """Read until the command ends, and return its exit status."""
        while self._read():
            pass
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.status

    def _read(self) -> bool:
        """Read what has arrived; False at the end of the output. Raises AssertionError after TIMEOUT_S."""
        left = self._started + TIMEOUT_S - time.monotonic()
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, left))
        assert ready, f"the command is still running; its output so far: {self.text[-2000:]!r}"
        try:
            part = os.read(self._descriptor, 1 << 16)
        except OSError:  # Linux reports the end of the output as an error
            return False
        self.output += part.decode(errors="replace")
        self.arrivals.append(time.monotonic() - self._started)
        return bool(part)


@contextmanager
def terminal(*args: str, **environment: str) -> Iterator[Terminal]:
    """`stoker ARGS` in a terminal of 100 columns. It is killed if it is still running at the end of the block."""
    command = [sys.executable, "-m", "stoker", *args]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40", **environment}
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execve(command[0], command, variables)
    running = Terminal(pid, descriptor)
    try:
        yield running
    finally:
        if running.status is None:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.close(descriptor)
