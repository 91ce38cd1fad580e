"""A server of our own, started for a demo, a benchmark or a test, and stopped with it."""

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
ANNOUNCED = re.compile(r"is served at (\S+) \(ready after ([0-9.]+) s\)")


@contextmanager
def served(engine: Path | str, options: Sequence[str] = (), *, log: IO[str] | None = None) -> Iterator[str]:
    """The URL of `stoker serve engine options`, on any free port unless they name one; stopped when the block ends.

    Its log goes to `log`, or to this process's stderr. Raises UnavailableError when it ends before it is ready.
    """
    port = [] if "--port" in options else ["--port", "0"]
    command = [sys.executable, "-m", "stoker", "serve", str(engine), *port, *options]
    # A session of its own: Ctrl-C reaches this process, which then asks the server to stop.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        env=env.child_environment(STOKER_LOG=env.text("STOKER_LOG", "warning")),
    )  # fmt: skip
    try:
        yield _url(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := ANNOUNCED.search(line):
            return found[1]
    raise UnavailableError(f"the server ended with status {process.wait()} before it was ready.", cure="Its log tells why.")
