"""A failed executor is started again: readiness, requests that run again, the limit, and messages to systemd. Executors have no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_http import until
from small_tokenizers import small
from test_server_processes import ServerProcess, serve

from stoker.base.errors import ConfigError
from stoker.server.processes import restart_policy
from stoker.server.processes.child import EXECUTOR_STOP_SIGNAL
from stoker.server.processes.restart_policy import RestartPolicy
from stoker.server.processes.systemd import ServiceManager
from stoker.server.settings import ServerSettings

STUB = "stub_executor"
FRONTEND = "stoker.server.processes.frontend_entry"
BODY = {"prompt": "the quick brown fox", "max_tokens": 40, "ignore_eos": True, "seed": 7, "temperature": 1.0}


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """The directory of an engine that consists of a tokenizer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    small("byte_level").save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextlib.asynccontextmanager
async def stub_server(stub: Path, **settings: Any) -> AsyncIterator[tuple[ServerProcess, httpx.AsyncClient]]:
    variables = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}", **settings.pop("environment", {})}
    async with (
        serve(stub, stub.parent, executor=STUB, environment=variables, **settings) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as client,
    ):
        yield served, client


def hold(stub: Path, num_tokens: int) -> None:
    """Sequences of the executor wait after this number of tokens."""
    (stub / "new").write_text(str(num_tokens))
    (stub / "new").rename(stub / "hold")


def kill_executor(served: ServerProcess, number: signal.Signals = signal.SIGKILL) -> int:
    (pid,) = served.children(STUB)
    os.kill(pid, number)
    return pid


async def wait_for_status(client: httpx.AsyncClient, status: int, reason: str = "") -> None:
    """Wait until /health/ready has this status, and this text in its body."""
    async with asyncio.timeout(30):
        while (response := await client.get("/health/ready")).status_code != status or reason not in response.text:
            await asyncio.sleep(0.01)


async def running(client: httpx.AsyncClient, number: int) -> None:
    """Wait until the executor runs this number of sequences."""
    async with asyncio.timeout(30):
        while f'stoker_running_sequences{{model="tiny"}} {number}.0' not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)


async def test_readiness_retries_and_errors_of_a_restart(stub: Path) -> None:
    """One server for several checks. While `hold` has a number, sequences wait after that number of tokens."""
    async with stub_server(stub, restarts=3, retry_unstarted=True) as (served, client):
        quiet = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        hold(stub, 3)
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await running(client, 2)
            hold(stub, 0)
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": [], "prompt": "x"}))
            unstarted = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": True}))
            await running(client, 3)
            (stub / "loading").touch()  # the next executor is ready after the checks below
            pid = kill_executor(served)
            rest = [line async for line in lines if line]
        assert (await waiting).status_code == 400, "what needs no executor is answered meanwhile"
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
        await wait_for_status(client, 503, '"reason":"the executor was killed by SIGKILL and is started again (restart 1 of 3)"')
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/ping")).status_code == 503 and "Loading" in (await client.get("/ping")).text, "SageMaker's health check"
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 503 and response.headers["retry-after"], "new requests are refused during a restart"
        (stub / "loading").unlink()
        (stub / "hold").unlink()
        assert (await whole).json()["choices"][0]["text"] == quiet, "nothing was sent to the client, so the request runs again"
        chunks = [json.loads(line[6:]) for line in (await unstarted).text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == quiet
        await wait_for_status(client, 200)
        metrics = (await client.get("/metrics")).text
        assert 'stoker_process_restarts_total{process="executor"} 1.0' in metrics
        assert 'stoker_retried_requests_total{model="tiny"} 2.0' in metrics

        (frontend,) = served.children(FRONTEND)
        os.kill(frontend, signal.SIGKILL)
        async with asyncio.timeout(30):
            while not set(served.children(FRONTEND)) - {frontend}:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as other:  # waits in the listening socket, which the supervisor holds
            await wait_for_status(other, 200)
            assert (await other.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == quiet
        served.process.terminate()
        assert await served.ended() == 0
    logged = "\n".join(served.lines())
    assert f"the executor (process {pid}) was killed by SIGKILL; it is started again in 0.5 s (restart 1 of 3)." in logged
    assert "the new executor (process" in logged and "Traceback" not in logged


async def test_two_frontends_and_an_executor_that_cannot_be_started_again(stub: Path) -> None:
    async with stub_server(stub, restarts=2, num_frontends=2) as (served, client):
        hold(stub, 0)
        call = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await running(client, 1)
        kill_executor(served, EXECUTOR_STOP_SIGNAL)
        response = await call
        assert response.status_code == 503, "without retry_unstarted the request is answered with an error"
        await wait_for_status(client, 200)
        (stub / "hold").unlink()
        for _ in range(8):  # connections are distributed over the frontends
            async with httpx.AsyncClient(base_url=served.url, timeout=30) as other:
                await wait_for_status(other, 200)
                assert (await other.post("/v1/completions", json=BODY)).status_code == 200
        (stub / "refuse").touch()
        kill_executor(served)
        assert await served.ended() == 1
    lines = served.lines()
    assert any("could not be started again (the stub refuses to load.), after 2 restarts in a row." in line for line in lines), lines
    assert not any("Traceback" in line for line in lines)


async def test_a_hung_executor_is_ended_and_started_again(stub: Path) -> None:
    """It is suspended, so it does not answer; the stub's step_timeout_s is 3."""
    async with stub_server(stub, restarts=1) as (served, client):
        assert (await client.get("/metrics")).status_code == 200
        pid = kill_executor(served, signal.SIGSTOP)
        async with asyncio.timeout(2):  # not the 3 s after which the executor counts as hung; usually 0.5 s
            text = (await client.get("/metrics")).text
        assert "\nstoker_queue_size{" in text and "\nstoker_statistics_age_seconds{" in text
        async with asyncio.timeout(50):
            while not any("the new executor" in line for line in served.lines()):
                await asyncio.sleep(0.05)
        await wait_for_status(client, 200)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        served.process.terminate()
        assert await served.ended() == 0
    assert any(f"the executor (process {pid}) has not answered for 3 s; it is ended." in line for line in served.lines())


async def test_weights_that_are_truncated_in_use_are_named(stub: Path) -> None:
    """The kernel ends a process that reads a page of a mapped file beyond its end. The stub maps nothing, so the test sends the signal."""
    weights = stub / "rank0.safetensors"
    weights.write_bytes(b"x" * 100)
    async with stub_server(stub) as (served, _):
        os.truncate(weights, 50)
        pid = kill_executor(served, signal.SIGBUS)
        assert await served.ended() == 1
    cause = f"was killed by SIGBUS, because a file was truncated while it was in use: {weights}"
    assert any(cause in line for line in served.lines()), (pid, served.lines())


@contextlib.contextmanager
def service_manager(path: str) -> Iterator[list[dict[str, str]]]:
    """A datagram socket that receives what a server sends to systemd. The list has the variables of each datagram."""
    received: list[dict[str, str]] = []
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(path)
    receiver.setblocking(False)
    loop = asyncio.get_running_loop()
    loop.add_reader(receiver, lambda: received.append(dict(line.split("=", 1) for line in receiver.recv(4096).decode().split("\n"))))
    try:
        yield received
    finally:
        loop.remove_reader(receiver)
        receiver.close()


async def test_systemd_receives_the_state_of_the_server(stub: Path, tmp_path: Path) -> None:
    def has(name: str, value: str) -> bool:
        return any(value in datagram.get(name, "") for datagram in received)

    with service_manager(str(tmp_path / "notify")) as received:
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        async with stub_server(stub, restarts=1, environment=environment) as (served, client):
            await until(lambda: has("WATCHDOG", "1"))
            assert received[0] == {"STATUS": "Loading the engine."}
            ready = next(datagram for datagram in received if "READY" in datagram)
            assert ready == {"READY": "1", "STATUS": f"tiny is served at {served.url}"}
            kill_executor(served)
            await until(lambda: has("STATUS", "Not ready: the executor was killed by SIGKILL and is started again (restart 1 of 1)."))
            await wait_for_status(client, 503)
            await wait_for_status(client, 200)
            served.process.terminate()
            assert await served.ended() == 0
        assert has("STOPPING", "1")


async def test_the_watchdog_waits_for_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checked = asyncio.Event()

    async def check() -> None:
        await checked.wait()

    for name, value in {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}.items():
        monkeypatch.setenv(name, value)
    with service_manager(str(tmp_path / "notify")) as received:
        manager = ServiceManager()
        task = asyncio.create_task(manager.keep_alive(check))
        manager.report("two\nlines")
        await until(lambda: received)
        assert received == [{"STATUS": "two lines"}], "a frontend that does not answer stops the notifications"
        checked.set()
        await until(lambda: len(received) > 3)
        assert received[1:4] == [{"WATCHDOG": "1"}] * 3
        task.cancel()
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert manager.watchdog_s is None, "the notifications of another process are expected"
    manager.report("the socket does not exist any more")


async def test_the_first_restart_counts_again_after_a_healthy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RestartPolicy(3)
    assert [policy.next_delay_s() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    policy.note_ready()
    assert policy.next_delay_s() is None, "it was ready for a short time"
    monkeypatch.setattr(restart_policy, "STABLE_S", -1.0)
    policy.note_ready()
    assert policy.next_delay_s() == 0.5


def test_retries_need_restarts() -> None:
    with pytest.raises(ConfigError, match=r"retry_unstarted=True is refused: a failed executor is not started again\. Set --restarts"):
        ServerSettings(retry_unstarted=True)
    with pytest.raises(ConfigError, match="restarts"):
        ServerSettings(restarts=-1)
