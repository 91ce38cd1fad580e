"""The server under test, from outside: its processes by role, what they hold, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.wire import Connection

START_S = 180.0
STOP_S = 90.0
ROLES = {
    "processes.frontend_entry": "frontend",
    "processes.executor": "executor",
    "chaos.stub_executor": "executor",
    "worker_group.follower": "rank",
    "frontend.rendering.worker": "renderer",
    "grammar_process": "compiler",
}
STARTED = re.compile(r"Started (\w+)(?: Service)? at ([\d.]+):(\d+)")


class Server:
    """A server that runs serve.py with these settings. Its log is written to a file."""

    def __init__(
        self, repository: Path, log: Path, settings: dict[str, Any], runtime: dict[str, Any], environment: dict[str, str], *, stub: bool
    ) -> None:
        self.repository, self.log = repository, log
        program = str(Path(__file__).with_name("serve.py"))
        changes = {"settings": {"http_port": 0, "metrics_port": None, **settings}, "runtime": runtime}
        self._command = [sys.executable, program, str(repository), json.dumps(changes), *(["--stub"] if stub else [])]
        paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
        self.host, self.port, self.grpc_port = "127.0.0.1", 0, None

    def start(self) -> None:
        """Start the process. `wait_until_ready` waits for it."""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment, start_new_session=True
            )

    async def wait_until_ready(self) -> None:
        """Return when the server is ready. Raises RuntimeError with the log if it ends before that."""
        async with asyncio.timeout(START_S):
            while " is served at " not in self.log.read_text():
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")
                await asyncio.sleep(0.1)
        ports = {name: int(port) for name, _, port in STARTED.findall(self.log.read_text())}
        self.port, self.grpc_port = ports["HTTPService"], ports.get("GRPCInferenceService")

    async def stop(self) -> int:
        """Stop the server in order; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -1

    def kill(self) -> None:
        """Kill the server with all its processes."""
        pids = [pid for _, pid in self.processes()]
        for pid in [*pids, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[tuple[str, int]]:
        """(role, process id) of the descendants, in the order of their start; `other` for those without a role."""
        found = []
        for pid in sorted(_descendants(self.process.pid)):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                found.append((next((role for part, role in ROLES.items() if part in command), "other"), pid))
        return found

    def pids(self, role: str) -> list[int]:
        """The processes with this role."""
        return [pid for found, pid in self.processes() if found == role]

    async def metrics(self) -> dict[str, float]:
        """The samples of /metrics without their labels; samples of one name are added. Empty if the server does not answer."""
        body = await get(self.host, self.port, "/metrics")
        values: dict[str, float] = {}
        for line in body.decode().splitlines():
            if match := re.match(r"(\w+)(?:\{.*\})? ([-\d.e+]+)$", line):
                values[match[1]] = values.get(match[1], 0.0) + float(match[2])
        return values

    async def is_ready(self) -> bool:
        """Whether readiness has status 200."""
        return bool(await get(self.host, self.port, "/health/ready", ok_is_enough=True))


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


async def get(host: str, port: int, path: str, *, ok_is_enough: bool = False) -> bytes:
    """The body of a response with status 200, empty for every other; with `ok_is_enough`, b"200" for status 200."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n\r\n".encode())
                response = await reader.read(-1)
            finally:
                writer.close()
            head, _, body = response.partition(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 200"):
                return b"200" if ok_is_enough else body
    return b""


async def post(host: str, port: int, path: str, body: Any, deadline_s: float = 120.0) -> tuple[int, str]:
    """(status, body) of a request; status 0 without a response."""
    from chaos.wire import POLITE

    connection = Connection(host, port)
    response = await connection.post(path, body, POLITE, deadline_s)
    connection.close()
    return response.status if response.ended == "complete" else 0, response.body.decode("utf-8", "replace")
