"""The processes of a replica of Ray Serve, without a Ray cluster: their output, their failures, and their end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from stoker.ray.engine_replica import EngineReplica, HostActor
from stoker.ray.server_process import ServerProcess

# Output as of CUDA errors and tracebacks: blank lines, bytes that are no UTF-8, a line over the limit, and more than a pipe holds.
NOISY = r"""
import sys
out = sys.stdout.buffer
out.write(b"\nTraceback:\n\n\xff\xfe\n" + b"x" * (3 << 20) + b"\n" + b"\n" * (1 << 18))
out.write(b"m is served at http://127.0.0.1:1 (ready)\n\nlast line\n")
out.flush()
sys.stdin.read()
sys.exit(3)
"""


def process_of(code: str) -> ServerProcess:
    """A process that runs `code` instead of a server."""
    return ServerProcess(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}", {}, {})


async def test_the_whole_output_is_read() -> None:
    process = process_of(NOISY)
    assert process.failure is None  # before the start
    await process.stop(1)
    await process.start()
    assert await process.wait_until_ready(50) == "http://127.0.0.1:1"
    assert process.failure is None
    assert process._process is not None and process._process.stdin is not None
    process._process.stdin.close()
    await process._reading
    assert process.failure is not None and process.failure.startswith("the server exited with status 3:")
    assert process.failure.endswith("\n\nlast line")
    await process.stop(50)


async def test_stopping_ends_although_another_process_keeps_the_output_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank processes of a server inherit its output."""
    monkeypatch.setattr("stoker.ray.server_process._END_S", 0.01)
    child = "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    process = process_of(f"import subprocess, sys; {child}; print('m is served at http://127.0.0.1:1', flush=True)")
    await process.start()
    await process.wait_until_ready(50)
    await asyncio.wait_for(process.stop(0.01), 50)
    assert process._process is not None and process._process.stdin is not None and process._process.stdout is not None
    process._process.stdin.close()
    await process._process.stdout.read()  # the end of the child


async def test_a_host_that_is_starting_has_not_failed_and_a_failed_start_is_reported() -> None:
    """Ray calls `failure` while `start` runs."""
    host = HostActor()
    settings: Any = SimpleNamespace(command="/absent/program")
    starting = asyncio.ensure_future(host.start(settings, {}, {}))
    while host._server is None:
        await asyncio.sleep(0)
    assert await host.failure() is None
    replica: Any = SimpleNamespace(_server=ServerProcess("true", {}, {}), _starts=[asyncio.get_running_loop().create_future()])
    replica._hosts = [SimpleNamespace(failure=SimpleNamespace(remote=host.failure))]
    await EngineReplica._check_processes(replica)
    await asyncio.wait([starting])
    replica._starts = [starting]
    with pytest.raises(RuntimeError, match=r"host 1 of the replica could not be started: .*/absent/program"):
        await EngineReplica._check_processes(replica)
