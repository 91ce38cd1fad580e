"""The processes of all ranks start before the task is known, and none remains when a start ends early."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cases import GROUPED, POSITIONS
from oracles import hf_model
from rank_executors import generate

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, RankError
from stoker.base.nodes import NodeSettings
from stoker.base.start_times import StartTimes
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.executor import ExecutorBenchmark
from stoker.frontend.in_process_engine import InProcessEngine
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.expected_devices import expected_devices
from stoker.runtime.load import load_executor
from stoker.runtime.worker_group.follower_process import FollowerProcess, WaitingFollowers
from stoker.server.processes.executor_control import prestart_executor
from stoker.server.processes.tasks import ExecutorTask

TIMEOUT_S = 40.0
CONFIG = RuntimeConfig(num_threads=1, kv_cache_tokens=1024)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("start")
    hf_model("Llama", **GROUPED).save_pretrained(folder / "hf")
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=8, tokens_per_block=16)
    settings = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits, mapping=Mapping(tensor_parallel=2))
    build(folder / "hf", folder / "engine", settings, verify="none")
    return folder / "engine"


def children(pid: int) -> list[int]:
    """The running child processes of a process."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in file.read_text().split() if is_running(int(child))]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_children(pid: int) -> list[int]:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := children(pid)):
        assert time.monotonic() < deadline, f"process {pid} has started no other"
        time.sleep(0.01)
    return found


@contextmanager
def ends(*pids: int) -> Iterator[None]:
    """Check that all these processes, which run before the block, end after it."""
    assert all(map(is_running, pids))
    yield
    deadline = time.monotonic() + TIMEOUT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process remains"
        time.sleep(0.01)


def test_an_engine_uses_the_waiting_processes(engine: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("stoker"), "propagate", True)
    with WaitingFollowers(["cuda:7", "cpu"]) as waiting:
        unused, used = (follower.process.pid for follower in waiting._waiting)
        with caplog.at_level(logging.INFO, "stoker"):
            executor = load_executor(engine, CONFIG, SynchronousMailbox, waiting=waiting, times=StartTimes())
        with ends(unused):
            waiting.close()
        with ends(used):
            assert len(generate(executor, [[5, 6, 7]], 3)[0]) == 3
            executor.close()
    zero, one = (record.getMessage() for record in caplog.records if record.getMessage().startswith("start of rank"))
    assert zero.startswith("start of rank 0: all ranks joining") and "weights" in zero and zero.endswith(" s")
    stages = [part.rpartition(" ")[0].rpartition(" ")[0] for part in one.removeprefix("start of rank 1: ").split(", ")]
    assert stages == ["imports", "device", "task", "communicator", "groups", "weights", "cache", "warm-up"]


def test_a_process_that_died_while_it_waited_is_named(engine: Path) -> None:
    with WaitingFollowers(["cpu"]) as waiting:
        process = waiting._waiting[0].process
        process.kill()
        process.wait()
        with pytest.raises(RankError, match="rank 1 on cpu was killed by SIGKILL; its log is ") as caught:
            load_executor(engine, CONFIG, SynchronousMailbox, waiting=waiting)
    shutil.rmtree(Path(str(caught.value).split("its log is ")[1].split(". ")[0]).parent)


def test_a_process_without_a_task_ends_with_its_leader() -> None:
    follower = FollowerProcess("cpu")
    with ends(follower.process.pid):
        follower._connection.close()  # as the end of the leader does, probably while it imports
        assert follower.process.wait(TIMEOUT_S) == 0
    follower.kill()


def test_no_process_remains_if_another_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FollowerProcess] = []
    init = FollowerProcess.__init__

    def first_only(self: FollowerProcess, device: str) -> None:
        if started:
            raise OSError("no more processes")
        init(self, device)
        started.append(self)

    monkeypatch.setattr(FollowerProcess, "__init__", first_only)
    with pytest.raises(OSError, match="no more processes"):
        WaitingFollowers(["cpu", "cpu"])
    assert started[0].process.returncode == -signal.SIGKILL


def test_a_refused_engine_leaves_no_process(engine: Path, tmp_path: Path) -> None:
    async def run() -> None:
        prestarted = prestart_executor(engine, CONFIG, NodeSettings())
        assert prestarted._process is not None
        pid = prestarted._process.pid
        followers = wait_for_children(pid)
        with ends(pid, *followers):
            child = await prestarted.adopt(ExecutorTask(str(tmp_path / "none"), CONFIG, f"ipc://{tmp_path}/executor"))
            failure = await child.failure()
            assert failure is not None and "none is not an engine: it does not exist" in failure
            assert await child.process.wait() == 1

    asyncio.run(run())


def test_closing_a_prestarted_executor_ends_all_ranks(engine: Path) -> None:
    prestarted = prestart_executor(engine, CONFIG, NodeSettings())
    assert prestarted._process is not None
    pid = prestarted._process.pid
    with ends(pid, *wait_for_children(pid)):
        prestarted.close()


@pytest.mark.parametrize(
    ("number", "statuses"),
    [(signal.SIGINT, (130, 0)), (signal.SIGTERM, (143, 0)), (signal.SIGKILL, (-signal.SIGKILL,))],  # 0: the supervisor runs already
)
def test_a_command_that_ends_while_its_ranks_import(
    engine: Path, tmp_path: Path, number: signal.Signals, statuses: tuple[int, ...]
) -> None:
    command = [sys.executable, "-m", "stoker", "serve", str(engine), "--port", "0", "--kv-cache-tokens", "1024"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as server:
        (executor,) = wait_for_children(server.pid)[:1]
        followers = wait_for_children(executor)
        with ends(server.pid, executor, *followers):
            server.send_signal(number)
            out, _ = server.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in out and "(ready after" not in out
    assert server.returncode in statuses


def test_engines_in_this_process_use_the_waiting_processes(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FollowerProcess] = []
    init = FollowerProcess.__init__

    def counted(self: FollowerProcess, device: str) -> None:
        init(self, device)
        started.append(self)

    monkeypatch.setattr(FollowerProcess, "__init__", counted)
    benchmark = ExecutorBenchmark(engine, CONFIG)
    with ends(*(follower.process.pid for follower in started)):
        benchmark.executor.close()
    in_process = InProcessEngine(engine, CONFIG)
    with ends(started[-1].process.pid):
        in_process.close()
    with pytest.raises(ConfigError, match="name GPUs"):
        InProcessEngine(engine, RuntimeConfig(device="cpu", devices=(1, 0)))
    assert [(follower.rank, follower.device) for follower in started] == [(1, "cpu"), (1, "cpu"), (-1, "cpu")]
    assert started[-1].process.returncode == -signal.SIGKILL


def test_only_ranks_import_torch(engine: Path) -> None:
    command = [sys.executable, "-m", "stoker", "serve", str(engine), "--port", "0", "--kv-cache-tokens", "1024"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and "(ready after" in server.stdout.readline()
        modules = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2] for pid in children(server.pid)}
        executor = next(pid for pid, module in modules.items() if module == "stoker.server.processes.executor")
        frontend = next(pid for pid, module in modules.items() if module == "stoker.server.processes.frontend_entry")
        (follower,) = children(executor)
        uses_torch = {pid: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (server.pid, frontend, executor, follower)}
        with ends(*uses_torch):
            server.terminate()
            assert server.wait(TIMEOUT_S) == 0
    assert uses_torch == {server.pid: False, frontend: False, executor: True, follower: True}


def test_the_error_of_an_executor_is_that_of_the_command(engine: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "engine")
    shutil.copy(copy / "rank0.safetensors", copy / "rank1.safetensors")
    for path, options, status, message in (
        (engine, ["--devices", "0,1"], 2, f"stoker: devices=[0, 1] name GPUs, and {engine} runs on the CPU. Leave devices out.\n"),
        (copy, [], 1, f"stoker: {copy}/rank1.safetensors is from another build or rank: its header says rank 0 of 2 of engine"),
    ):
        command = [sys.executable, "-m", "stoker", "serve", str(path), "--port", "0", "--kv-cache-tokens", "1024", *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert (ended.returncode, ended.stdout) == (status, "")
        assert ended.stderr.startswith(message) and ended.stderr.count("\n") == 1


def test_expected_devices(engine: Path, tmp_path: Path) -> None:
    assert expected_devices(engine, RuntimeConfig()) == ["cpu", "cpu"]
    assert expected_devices(engine, RuntimeConfig(device="cuda")) == ["cuda:0", "cuda:1"]
    assert expected_devices(engine, RuntimeConfig(device="cuda", devices=(3, 1))) == ["cuda:3", "cuda:1"]
    assert expected_devices(engine, RuntimeConfig(device="cuda", devices=(3,))) == []
    two = NodeSettings(num_nodes=2, node_rank=1, rendezvous="localhost:29400")
    assert expected_devices(engine, RuntimeConfig(device="cuda", devices=(3, 1)), two) == ["cuda:1"]
    assert expected_devices(engine, RuntimeConfig(device="cuda", devices=(2,)), two) == ["cuda:2"]
    assert expected_devices(engine, RuntimeConfig(), NodeSettings(num_nodes=3, rendezvous="localhost:29400")) == []
    assert expected_devices(tmp_path, RuntimeConfig()) == []
    for content, devices in (
        ('{"mapping": {"pipeline_parallel": 2}, "target": {"device": "cuda"}}', ["cuda:1", "cuda:0"]),  # the leader is in the last stage
        ('{"mapping": {"tensor_parallel": 1024}}', []),
        ('{"mapping": {"tensor_parallel": 0}}', []),
        ('{"mapping": 2}', []),
        ('{"model_type": "llama"}', ["cpu"]),
        ("[", []),
        ("\udcff", []),
    ):
        (tmp_path / "config.json").write_text(content, errors="surrogateescape")
        assert expected_devices(tmp_path, RuntimeConfig()) == devices, content
