"""`stoker serve` as a child process of a Ray actor. It ends with the actor, whatever the reason."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import signal
import socket
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from stoker.base import env
from stoker.base.errors import UnavailableError
from stoker.base.logging import get_logger

log = get_logger(__name__)

READY = re.compile(r"is served at (\S+)")
_NUM_LINES = 20  # of the log, for messages
_MAX_LINE_BYTES = 1 << 20
_END_S = 3.0  # limit for the end of the output after the process was killed


class ServerProcess:
    """One process. `options` are those of the --config file of `stoker serve`."""

    def __init__(self, command: str, options: dict[str, Any], environment: dict[str, str]) -> None:
        self._command = shlex.split(command) if command else [sys.executable, "-m", "stoker"]
        self._options, self._environment = options, environment
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process. It stops when its standard input ends, which is a pipe of this process."""
        self._folder = tempfile.TemporaryDirectory(prefix="stoker-ray-")
        file = Path(self._folder.name) / "serve.yaml"
        file.write_text(yaml.safe_dump(self._options), encoding="utf-8")
        self._process = await asyncio.create_subprocess_exec(
            *self._command, "serve", "--config", str(file), "--stop-at-eof", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env.child_environment(**self._environment),
            limit=_MAX_LINE_BYTES,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))

    async def wait_until_ready(self, timeout_s: float) -> str:
        """The URL of the server. Raises UnavailableError if it ends before, or is not ready in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise UnavailableError(f"the server was not ready within {timeout_s:g} s.", cure="Raise start_timeout_s.") from None

    @property
    def failure(self) -> str | None:
        """Why the process has ended, with the end of its log; None while it runs, and before it was started."""
        status = self._process.returncode if self._process is not None else None
        return None if status is None else f"the server exited with status {status}:\n" + "\n".join(self._lines)

    async def stop(self, timeout_s: float) -> None:
        """Stop the process after its requests in flight, or kill it after `timeout_s`. Does nothing before it was started."""
        if self._process is None:
            return
        for number, limit_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _END_S)):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            await asyncio.wait([self._reading], timeout=limit_s)
            if self._reading.done():
                break
        self._reading.cancel()  # a process that the server has started may keep the output open
        self._folder.cleanup()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Copy the output to the actor's log until it ends, and find the URL in it.

        Whatever a line contains, the next one is read: a server whose output is not read blocks when it writes.
        """
        assert process.stdout is not None
        while True:
            try:
                data = await process.stdout.readline()
            except ValueError:  # the stream has removed the line, or the part of it that was received
                data = b"(a part of the log with more than %d bytes in one line is left out)\n" % _MAX_LINE_BYTES
            if not data:
                break
            line = data.decode(errors="replace").rstrip()
            self._lines.append(line)
            with contextlib.suppress(OSError, UnicodeError):  # of the actor's output
                print(line, flush=True)
            if (match := READY.search(line)) and not self._ready.done():
                self._ready.set_result(match[1])
        await process.wait()
        if not self._ready.done():
            self._ready.set_exception(UnavailableError(self.failure or "the server ended.", cure="Correct the reason in its log."))


def free_port(host: str) -> int:
    """A free TCP port of an address of this host."""
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])
