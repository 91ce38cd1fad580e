"""The server as real processes with a real engine: start, responses, disconnecting clients, processes that end, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_http import events, until

from stoker.base.config import RuntimeConfig
from stoker.base.errors import ConfigError
from stoker.server.processes.child import EXECUTOR_STOP_SIGNAL
from stoker.server.processes.listeners import bind, reserve
from stoker.server.processes.supervisor import serve as run
from stoker.server.processes.tasks import ExecutorTask
from stoker.server.settings import ServerSettings

PROGRAM = str(Path(__file__).parent / "served.py")
LONG = {"prompt": "the quick brown fox", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
MANY = {**LONG, "n": 4, "prompt": [LONG["prompt"]] * 250}  # takes 14 s, so a test can observe that it is running


class ServerProcess:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self.url = ""
        self._errors = errors

    async def ended(self) -> int:
        """Wait for the end; returns the exit status."""
        return await asyncio.to_thread(self.process.wait, 60)

    def lines(self) -> list[str]:
        """The lines of standard error."""
        return self._errors.read_text().splitlines()

    def children(self, module: str) -> list[int]:
        """Process ids of the children that run `module`."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
                if int(stat[1]) == self.process.pid and module in (path / "cmdline").read_text():
                    pids.append(int(path.name))
        return pids


@contextlib.asynccontextmanager
async def serve(
    engine: Path, errors: Path, *, executor: str | None = None, environment: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[ServerProcess]:
    """A server, with the executor of another module and further environment variables if they are given."""
    with (errors / "stderr").open("w") as stderr:
        command = [sys.executable, PROGRAM, str(engine), json.dumps(settings), *([executor] if executor is not None else [])]
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables)
    served = ServerProcess(process, errors / "stderr")
    try:
        assert process.stdout is not None
        if line := await asyncio.to_thread(process.stdout.readline):
            assert line.startswith("tiny is served at http://127.0.0.1:")
            served.url = line.split()[4]
        else:
            await served.ended()
        yield served
    finally:
        for pid in [*served.children("stoker.server"), process.pid] if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await served.ended()
        process.stdout.close()  # type: ignore[union-attr]


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f'{name}{{model="tiny"')))


async def test_responses_disconnection_and_draining(engine: Path, tmp_path: Path) -> None:
    """One server for several checks, because its start takes seconds."""
    async with serve(engine, tmp_path, drain_timeout_s=20) as served, httpx.AsyncClient(base_url=served.url, timeout=30) as client:
        assert (await client.get("/health")).status_code == 200
        whole = (await client.post("/v1/completions", json=LONG)).json()
        streamed = events((await client.post("/v1/completions", json={**LONG, "stream": True})).text)
        text = "".join(choice["text"] for chunk in streamed[:-1] for choice in chunk["choices"])
        assert text == whole["choices"][0]["text"] and whole["usage"]["completion_tokens"] == 100
        assert (await client.post("/v1/completions", json={"prompt": "x " * 500})).status_code == 400
        generated = await client.post("/v2/models/ensemble/generate", json={"text_input": LONG["prompt"], "max_tokens": 100, "end_id": -1})
        assert generated.json()["text_output"] == LONG["prompt"] + text, "both protocols decode greedily"

        async with client.stream("POST", "/v1/completions", json={**MANY, "stream": True}) as answer:
            lines = answer.aiter_lines()  # a generator that nothing refers to is closed, and closes the connection
            await anext(lines)
            async with asyncio.timeout(10):  # while a step takes long, /metrics answers with the last known statistics
                while not await metric(client, "stoker_kv_blocks_used"):
                    await asyncio.sleep(0.002)
        async with asyncio.timeout(10):
            while await metric(client, "stoker_kv_blocks_used"):
                await asyncio.sleep(0.01)

        body = {**LONG, "n": 8, "prompt": [LONG["prompt"]] * 4, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            served.process.terminate()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"completion_tokens":3200' in rest[-2], "a request in flight is completed"
        assert await served.ended() == 0
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(served.url)


async def test_a_killed_executor_ends_the_server(engine: Path, tmp_path: Path) -> None:
    async with serve(engine, tmp_path) as served, httpx.AsyncClient(base_url=served.url, timeout=30) as client:
        (executor,) = served.children("stoker.server.processes.executor")
        call = asyncio.create_task(client.post("/v1/completions", json=MANY))
        async with asyncio.timeout(10):
            while not await metric(client, "stoker_running_sequences"):
                await asyncio.sleep(0.002)
        os.kill(executor, signal.SIGKILL)
        assert (await call).status_code == 503
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v2/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.post("/v1/completions", json=LONG)).status_code == 503
        assert await served.ended() == 1
        assert any("the executor was killed by SIGKILL; the server stops." in line for line in served.lines())


async def test_counters_of_two_frontends_and_the_second_signal(engine: Path, tmp_path: Path) -> None:
    async with serve(engine, tmp_path, num_frontends=2, drain_timeout_s=60) as served:
        assert len(served.children("stoker.server.processes.frontend_entry")) == 2
        for _ in range(6):
            async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
                assert (await client.post("/v1/completions", json={**LONG, "max_tokens": 2})).status_code == 200
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            async with asyncio.timeout(10):  # the counts of the other frontend are up to 0.25 s old
                while (total := await metric(client, "stoker_output_tokens_total")) < 12:
                    continue
            assert total == 12
            async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                children = served.children("stoker.server")
                # A suspended executor cannot complete the stream, so draining would take 60 s.
                os.kill(served.children("stoker.server.processes.executor")[0], signal.SIGSTOP)
                served.process.send_signal(signal.SIGINT)
                served.process.send_signal(signal.SIGTERM)  # a different signal, because two pending signals of the same kind count as one
                assert await asyncio.wait_for(served.ended(), 10) == 0
        assert not any(is_running(pid) for pid in children)


async def test_one_of_two_frontends_is_started_again(engine: Path, tmp_path: Path) -> None:
    """A suspended frontend accepts no connections, so the test decides which one serves."""
    module = "stoker.server.processes.frontend_entry"
    async with serve(engine, tmp_path, num_frontends=2) as served:
        failing, lasting = served.children(module)
        os.kill(failing, signal.SIGSTOP)
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            body = {**LONG, "n": 4, "prompt": [LONG["prompt"]] * 8, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                os.kill(failing, signal.SIGKILL)
                rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "error" not in "".join(rest), "requests of the other frontend continue"
        async with asyncio.timeout(30):
            while not any("the new frontend" in line for line in served.lines()):
                await asyncio.sleep(0.01)
        (replacement,) = set(served.children(module)) - {lasting}
        os.kill(lasting, signal.SIGSTOP)
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            assert (await client.post("/v1/completions", json={**LONG, "max_tokens": 2})).status_code == 200
        os.kill(lasting, signal.SIGCONT)
        served.process.terminate()
        assert await served.ended() == 0
        assert not is_running(replacement)
        assert any(f"(process {failing}) was killed by SIGKILL; it is started again" in line for line in served.lines())


async def test_children_end_with_their_parent(engine: Path, tmp_path: Path) -> None:
    async with serve(engine, tmp_path) as served:
        children = served.children("stoker.server")
        assert len(children) == 2
        served.process.kill()
        await until(lambda: not any(is_running(pid) for pid in children))


@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
async def test_the_stop_signal_during_the_start_prints_nothing(engine: Path, tmp_path: Path, library: str) -> None:
    """An exception in a signal handler during the import of a compiled module would surface as a different exception."""
    with (tmp_path / "stderr").open("w") as stderr:
        task = pickle.dumps(ExecutorTask(str(engine), RuntimeConfig(device="cpu"), f"ipc://{tmp_path}/executor"))
        command = [sys.executable, "-m", "stoker.server.processes.executor"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr)
    assert process.stdin is not None
    process.stdin.write(len(task).to_bytes(8, "little") + task)
    process.stdin.flush()
    await until(lambda: library in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(EXECUTOR_STOP_SIGNAL)
    assert await asyncio.to_thread(process.wait, 10) == -EXECUTOR_STOP_SIGNAL
    process.stdin.close()
    assert not (tmp_path / "stderr").read_text()


async def test_an_engine_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    async with serve(tmp_path / "tiny", tmp_path) as served:
        assert not served.url
        assert await served.ended() == 1
        lines = served.lines()
        assert not any("Traceback" in line for line in lines), lines
        assert any(str(tmp_path) in line for line in lines), "the error names the folder"


async def test_a_port_in_use_is_reported_before_the_start(engine: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be used: Address already in use. Stop the other"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host='nowhere\.invalid' cannot be used"):
        bind("nowhere.invalid", 0)


def test_a_grpc_port_in_use_is_reported_before_the_start(engine: Path) -> None:
    with reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be used: Address already in use.*another --grpc-port"):
            run(engine, RuntimeConfig(), ServerSettings(http_port=0, grpc_port=port))


def test_a_frontend_imports_no_torch() -> None:
    code = "import sys, stoker.server.processes.frontend; assert not {'torch', 'transformers'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_start_imports_neither_protocols_nor_what_runs_steps_before_its_executor_has_the_task() -> None:
    """The command imports the first modules before it starts the executor's process, and the checks while that imports torch."""
    before = "import sys, stoker.cli.commands.serve, stoker.cli.server_start, stoker.server.processes.supervisor"
    protocols, steps = ["stoker.server.protocols.registry", "numpy", "torch"], ["stoker.runtime.executor", "stoker.layers.decoder"]
    for modules, names in ((before, protocols), (f"{before}, stoker.runtime.start_checks", steps)):
        code = f"{modules}; print([name for name in {names} if name in sys.modules])"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
