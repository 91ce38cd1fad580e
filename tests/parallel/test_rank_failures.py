"""Errors are found before loading. A rank that ends or hangs ends all ranks within ten seconds, with an error that names its log."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import GROUPED, POSITIONS
from oracles import hf_model
from rank_executors import generate, load

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, EngineError, RankError
from stoker.base.profile_query import ProfileQuery, ProfileResult
from stoker.base.types import SamplingParams
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.distributed import world
from stoker.engine.reader import Engine
from stoker.runtime.executor import Executor
from stoker.runtime.request import TokenRequest
from stoker.runtime.worker.capacity import Capacity
from stoker.runtime.worker_group.channels.shared_memory import NUM_SLOTS
from stoker.runtime.worker_group.follower_process import FollowerProcess
from stoker.runtime.worker_group.leader import WorkerGroup

TWO = Mapping(tensor_parallel=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("two")
    hf_model("Llama", **GROUPED).save_pretrained(folder / "hf")
    make(folder / "hf", folder / "engine", tokenizer)
    return folder / "engine"


def make(source: Path, out: Path, tokenizer: Path, **more: object) -> None:
    limits = Limits(max_input_len=POSITIONS // 2, max_output_len=POSITIONS // 2, max_num_tokens=64, max_batch_size=8, tokens_per_block=16)
    settings = {"tokenizer": str(tokenizer), "device": "cpu", "dtype": "float32", "limits": limits, "mapping": TWO} | more
    build(source, out, BuildConfig(**settings), verify="none")  # type: ignore[arg-type]


def ranks_of(executor: Executor) -> WorkerGroup:
    assert isinstance(executor._ranks, WorkerGroup)
    return executor._ranks


def wait_for_rank_error(executor: Executor) -> float:
    """Seconds until the executor raises RankError, with one request in flight."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    executor.mailbox.submit([TokenRequest(request_id="last", prompt_ids=[5, 6, 7], params=params)])  # type: ignore[attr-defined]
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        while time.monotonic() - started < 15:
            executor.turn(0.0)
    duration = time.monotonic() - started
    message = str(caught.value)
    log = Path(message.split("its log is ")[1].split(". ")[0])
    assert "rank 1 on cpu" in message and log.name == "rank1.log" and log.is_file()
    shutil.rmtree(log.parent)
    return duration


def profile(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events of a profile of four steps."""
    results: list[ProfileResult] = []
    monkeypatch.setattr(executor.mailbox, "reply_profile", lambda query, result: results.append(result))
    executor.mailbox.messages.append(ProfileQuery("client", 1, 4, 30.0))  # type: ignore[attr-defined]
    executor.turn(0.0)
    generate(executor, [[5, 6, 7]], 6)
    deadline = time.monotonic() + 40
    while not results and time.monotonic() < deadline:
        executor.turn(0.01)
    (result,) = results
    assert result.num_steps == 4, result.error
    events: list[dict[str, Any]] = json.loads(Path(result.path).read_text())["traceEvents"]
    shutil.rmtree(Path(result.path).parent)
    return events


def test_a_profile_has_all_ranks_and_a_killed_rank_ends_them(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load(engine)
    process = ranks_of(executor)._local.followers[0].process
    assert generate(executor, [[5, 6, 7]], 3)
    events = profile(executor, monkeypatch)
    named = {event["args"]["name"].partition(":")[0] for event in events if event.get("name") == "process_name"}
    assert {"rank 0", "rank 1"} <= named
    sums = {event["pid"] for event in events if "all_reduce" in str(event.get("name")) or "allreduce" in str(event.get("name"))}
    assert len(sums) == 2, "the collectives of both ranks"
    threading.Timer(0.05, process.kill).start()
    assert wait_for_rank_error(executor) < 5
    executor.close()
    assert process.returncode == -signal.SIGKILL


def test_a_collective_ends_after_a_failure_although_gloo_keeps_waiting() -> None:
    """After gloo has dropped a send, only the timeout ends a collective. Here the other rank does not take part."""
    code = """
import threading, time, torch
from torch.distributed import TCPStore
from stoker.base.config import Mapping
from stoker.base.errors import RankError
from stoker.distributed.world import join

CPU, TWO = torch.device("cpu"), Mapping(tensor_parallel=2)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", store.port, is_master=False)
others = []
joining = threading.Thread(target=lambda: others.append(join(client, 1, TWO, CPU)))
joining.start()
answers = iter([None, RankError("rank 1 has ended")])

def check():
    if (answer := next(answers)) is not None:
        raise answer

world = join(store, 0, TWO, CPU, check=check)
joining.join()
for collective in ("all_reduce", "all_gather", "broadcast"):
    answers = iter([None, RankError("rank 1 has ended")])
    try:
        getattr(world.tensor, collective)(torch.ones(4))
    except RankError as error:
        print(collective, "ended:", error.message)
world.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = [f"{collective} ended: rank 1 has ended" for collective in ("all_reduce", "all_gather", "broadcast")]
    assert (ran.returncode, ran.stdout.splitlines()) == (0, expected), ran.stderr


def test_engines_of_several_ranks_follow_each_other_in_one_process(engine: Path) -> None:
    """Each engine leaves its world when it is closed, and nothing is printed at the end of the process."""
    code = f"""
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rank_executors import generate, load

tokens = []
for _ in range(2):
    executor = load({str(engine)!r})
    tokens.append(generate(executor, [[5, 6, 7]], 3))
    executor.close()
    if len(tokens) == 1:  # after an attempt, a thread of gloo still releases the tensor, and aborts a process that ends meanwhile
        try:
            executor.runner.world.tensor.all_reduce(torch.ones(4))
        except RuntimeError:
            print("left")
assert tokens[0] == tokens[1]
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "left\n", "")


def test_a_hung_rank_ends_all_ranks(engine: Path) -> None:
    executor = load(engine)
    process = ranks_of(executor)._local.followers[0].process
    generate(executor, [[5, 6, 7]], 3)
    os.kill(process.pid, signal.SIGSTOP)
    assert wait_for_rank_error(executor) < 10
    executor.close()
    assert process.poll() is not None


def test_a_rank_that_cannot_load_is_named(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is removed after the leader has checked it."""
    copy = shutil.copytree(engine, tmp_path / "engine")
    monkeypatch.setattr("stoker.runtime.start_checks._check", lambda *_: (copy / "rank1.safetensors").unlink())
    with pytest.raises(
        RankError, match=r"rank 1 on cpu ended with status 1; its log is (.*)rank1.log.*rank1.safetensors is missing"
    ) as caught:
        load(copy)
    shutil.rmtree(folder_named_in(caught.value))


def folder_named_in(error: BaseException) -> Path:
    return Path(str(error).split("its log is ")[1].split(". ")[0]).parent


@pytest.mark.parametrize("moment", ["before the rendezvous", "before the leader joins", "after loading"])
def test_a_rank_that_dies_during_the_start_is_named(engine: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, states = WorkerGroup.wait, list[str]()

    def kill_after(ranks: WorkerGroup) -> None:
        wait(ranks)
        states.append("before" if not states else "after loading")
        if moment.startswith(states[-1]):
            ranks._local.followers[0].process.kill()
        while moment == "before the leader joins" and ranks._server is not None:  # the watch thread closes the rendezvous
            time.sleep(0.01)

    monkeypatch.setattr(WorkerGroup, "wait", kill_after)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 on cpu was killed by SIGKILL; its log is") as caught:
        load(engine)
    assert time.monotonic() - started < 15
    shutil.rmtree(folder_named_in(caught.value))


def test_a_rank_that_ends_while_others_connect_to_it_is_named() -> None:
    """The rank has published its address, to which gloo would connect for half an hour."""
    connecting, ended = threading.Event(), threading.Event()

    def connect() -> None:
        connecting.set()
        ended.wait()

    def check() -> None:
        connecting.wait()
        raise RankError("rank 1 was killed")

    with pytest.raises(RankError, match="rank 1 was killed"):
        world._call_checked(connect, check)
    ended.set()
    assert world._call_checked(lambda: 7, lambda: None) == 7
    with pytest.raises(RuntimeError, match="closed"):
        world._call_checked(lambda: (_ for _ in ()).throw(RuntimeError("the store is closed")), lambda: None)


def test_a_process_that_ends_immediately_is_named_and_leaves_no_descriptor(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setattr("stoker.runtime.worker_group.leader.log.critical", lambda *_: None)  # a captured record would reference the error
    counts = []
    for _ in range(3):
        with pytest.raises(RankError, match="rank 1 on cpu ended with status 1") as caught:
            load(engine)
        shutil.rmtree(folder_named_in(caught.value))
        caught = None  # type: ignore[assignment]  # the traceback of the error references the shared memory
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[2]


def test_started_processes_end_if_another_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    started: list[FollowerProcess] = []
    init = FollowerProcess.__init__

    def first_only(self: FollowerProcess, *args: Any) -> None:
        if started:
            raise OSError("no more processes")
        init(self, *args)
        started.append(self)

    monkeypatch.setattr(FollowerProcess, "__init__", first_only)
    model = SimpleNamespace(config=SimpleNamespace(mapping=Mapping(tensor_parallel=3), limits=Limits()), path=tmp_path)
    with pytest.raises(OSError, match="no more processes"):
        WorkerGroup(model, RuntimeConfig(), Capacity(1, 1, 16, 32), dict.fromkeys(range(3), torch.device("cpu")))  # type: ignore[arg-type]
    assert started[0].process.returncode == -signal.SIGKILL


def test_closing_does_not_wait_for_a_rank_that_reads_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    model = SimpleNamespace(config=SimpleNamespace(mapping=TWO, limits=Limits()), path=tmp_path)
    ranks = WorkerGroup(model, RuntimeConfig(), Capacity(1, 1, 16, 32), dict.fromkeys(range(2), torch.device("cpu")))  # type: ignore[arg-type]
    for block in range(NUM_SLOTS):
        ranks.publish_zero_blocks([block])
    closing = threading.Thread(target=ranks.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and ranks._local.followers[0].process.returncode == -signal.SIGKILL


def test_a_leader_that_fails_within_a_step_ends_all_ranks(engine: Path) -> None:
    """The other rank waits within a layer, and would take the collectives of the next step for those of this one."""
    executor = load(engine)
    generate(executor, [[5, 6, 7]], 3)
    layer: Any = executor.runner.model.layers[-1]  # type: ignore[attr-defined]

    def no_memory(*_: Any) -> None:
        raise MemoryError("out of memory")

    layer.mlp = no_memory
    try:
        with pytest.raises(RankError, match=r"rank 0 on cpu failed within a step \(MemoryError\('out of memory'\)\)"):
            generate(executor, [[5, 6, 7]], 3)
    finally:
        executor.close()


def test_followers_end_with_their_leader_and_leave_nothing(engine: Path, tmp_path: Path) -> None:
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}
from rank_executors import load
from pathlib import Path
executor = load(Path({str(engine)!r}))
print(executor._ranks._local.followers[0].process.pid, flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    pid = int(ran.stdout)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]:
        assert time.monotonic() < deadline, "the follower continues without its leader"
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())


def test_a_missing_rank_file_is_rejected(engine: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "engine")
    (copy / "rank1.safetensors").unlink()
    with pytest.raises(EngineError, match=r"rank1.safetensors is missing"):
        load(copy)


def test_swapped_rank_files_are_rejected(engine: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "engine")
    one, other = copy / "rank0.safetensors", copy / "rank1.safetensors"
    if one.stat().st_size == other.stat().st_size:
        one.rename(copy / "swapped")
        other.rename(one)
        (copy / "swapped").rename(other)
    with pytest.raises(EngineError, match="is from another build or rank: its header says rank 1 of 2"):
        load(copy)


def test_a_rank_file_of_another_build_is_rejected(engine: Path, tmp_path: Path, tokenizer: Path) -> None:
    hf_model("Llama", seed=1, **GROUPED).save_pretrained(tmp_path / "hf")
    make(tmp_path / "hf", tmp_path / "other", tokenizer)
    copy = shutil.copytree(engine, tmp_path / "engine")
    shutil.copy(tmp_path / "other" / "rank1.safetensors", copy)
    with pytest.raises(EngineError, match=r"rank1.safetensors is from another build or rank: its header says rank 1 of 2 of engine"):
        load(copy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": (0, 1)}, r"devices=\[0, 1\] name GPUs, and .* runs on the CPU"),
        ({"device": "cuda"}, r"built for 2 ranks \(tensor 2 × pipeline 1\); devices=\[0, 1\], and this machine has 0"),
        ({"device": "cuda", "devices": (0,)}, r"built for 2 ranks .*, and devices=\[0\] names 1"),
    ],
)
def test_devices_that_do_not_match_the_ranks_are_rejected_before_anything_loads(
    engine: Path, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("stoker.runtime.load.WorkerGroup", lambda *args: started.append(args))
    monkeypatch.setattr("stoker.runtime.load._load", lambda *args: started.append(args))
    with pytest.raises(ConfigError, match=message):
        load(engine, **settings)
    assert not started


def test_one_rank_cannot_run_an_engine_of_two(engine: Path) -> None:
    with pytest.raises(EngineError, match=r"was built for 2 ranks .* and 1 are running"):
        Engine.open(engine).check_world(1)
