"""Runs `stoker serve` as a child process, for the demo, the benchmarks and the tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stoker.base import env
from stoker.base.errors import UnavailableError

STOP_TIMEOUT_S = 60.0
READY_LINE = re.compile(r"is served at (\S+) \(ready after ([0-9.]+) s\)")  # what `stoker serve` prints


@contextmanager
def running_server(model: Path | str, options: Sequence[str] = (), *, log: IO[str] | None = None) -> Iterator[str]:
    """Start `stoker serve MODEL OPTIONS`, yield its URL once it is ready, and stop it when the block ends.

    The port is a free one unless `options` set it. The server's log is written to `log`, by default to this process's stderr. Raises
    UnavailableError when the server exits before it is ready.
    """
    port = [] if "--port" in options else ["--port", "0"]
    command = [sys.executable, "-m", "stoker", "serve", str(model), *port, *options]
    # In its own session the server does not receive Ctrl-C from the terminal; it is stopped below.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        env=env.child_environment(STOKER_LOG=env.text("STOKER_LOG", "warning")),
    )  # fmt: skip
    try:
        yield _wait_until_ready(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    """The URL of the server, from its ready line. Raises UnavailableError when it exits before."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := READY_LINE.search(line):
            return match[1]
    raise UnavailableError(f"the server exited with status {process.wait()} before it was ready.", cure="Read its log for the reason.")
