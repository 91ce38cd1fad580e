"""Ten processes ask for one engine; one builds it. A build that was killed leaves nothing that is taken for an engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from stoker.builder.build import build_cached
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.engine.cache import address, cached_engine
from stoker.engine.publish import workspace
from stoker.engine.reader import Engine

FORK = multiprocessing.get_context("fork")  # a fresh interpreter needs seconds for its imports


def ask(checkpoint: Path, answers: Connection, gate: Connection | None = None) -> None:
    """A process that wants the engine. Sends "began" when it is the one that builds; with a gate it stops there until told."""
    torch.set_num_threads(1)
    seen: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage != "read" and not seen:  # which comes before the lock
            seen.append(stage)
            answers.send(("began", os.getpid()))
            if gate is not None:
                gate.recv()

    answers.send(("path", str(build_cached(checkpoint, verify="files", progress=progress).path)))


def start(checkpoint: Path, gate: Connection | None = None) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    here, there = FORK.Pipe()
    process = FORK.Process(target=ask, args=(checkpoint, there, gate))
    process.start()
    there.close()
    return process, here


def answers(process: multiprocessing.process.BaseProcess, pipe: Connection) -> list[tuple[str, object]]:
    """Everything the process said until it ended."""
    said = []
    while pipe.poll(60):
        try:
            said.append(pipe.recv())
        except EOFError:
            break
    process.join(60)
    return said


def test_ten_processes_share_one_build(llama: Path) -> None:
    asking = [start(llama) for _ in range(10)]
    said = [answers(*one) for one in asking]
    assert all(process.exitcode == 0 for process, _ in asking)
    assert sum(kind == "began" for one in said for kind, _ in one) == 1
    (path,) = {value for one in said for kind, value in one if kind == "path"}
    Engine.open(str(path), verify=True)


def test_a_build_killed_half_way_is_built_again(llama: Path) -> None:
    gate, _keep = FORK.Pipe()
    first, pipe = start(llama, gate)
    assert pipe.recv() == ("began", first.pid)
    waiting, other = start(llama)
    assert not other.poll(0.2), "the second process did not wait for the lock"
    os.kill(first.pid or 0, signal.SIGKILL)
    said = answers(waiting, other)
    first.join(60)
    assert first.exitcode == -signal.SIGKILL and waiting.exitcode == 0
    assert [kind for kind, _ in said] == ["began", "path"]
    path = Path(str(said[-1][1]))
    Engine.open(path, verify=True)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_a_failed_build_leaves_the_cache_empty(llama: Path, tmp_path: Path) -> None:
    config = prepare(llama, BuildConfig()).with_fingerprint().config

    def fail(path: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_engine(config, fail)
    engine = build_cached(llama, verify="files")
    assert engine.path.name == address(config)
    made: list[Path] = []
    assert cached_engine(engine.config, made.append).path == engine.path and made == []


def test_a_workspace_goes_with_its_process_not_with_its_number(tmp_path: Path) -> None:
    """In a container that is started again, the build that was killed had this one's host name and process id."""
    out = tmp_path / "engine"
    with workspace(out) as work:
        (work / "half").touch()
        name = work.name
        with workspace(tmp_path / "other"):
            assert work.exists()
    host_and_pid = name.rpartition(".")[0]
    dead = [tmp_path / f"{host_and_pid}.1", tmp_path / f"{host_and_pid}.1.old", tmp_path / f"{host_and_pid}0000000.1"]
    elsewhere = tmp_path / ".engine.building-another-host-1.1"
    for left in [*dead, elsewhere]:
        left.mkdir()
    replacing = tmp_path / f"{name}.old"
    replacing.mkdir()
    with workspace(out) as work:
        assert not any(left.exists() for left in dead) and elsewhere.exists() and replacing.exists()
        assert work.name == name and not list(work.iterdir())


def test_an_address_is_of_contents(llama: Path, tmp_path: Path) -> None:
    def where(path: Path, config: BuildConfig = BuildConfig()) -> str:
        return address(prepare(path, config).with_fingerprint().config)

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert where(copy) == where(llama)
    assert where(llama, BuildConfig(dtype="float16")) != where(llama)
    assert where(llama, BuildConfig(dtype="float32", device="cpu")) == where(llama)
    (copy / "tokenizer_config.json").write_text("{}")
    assert where(copy) != where(llama)
