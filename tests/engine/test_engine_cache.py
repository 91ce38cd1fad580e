"""The engine cache: concurrent processes build an engine once, and a killed build leaves nothing that looks like an engine."""

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
from stoker.builder.prepare import add_fingerprint, prepare
from stoker.engine.cache import cached_engine
from stoker.engine.config import content_address
from stoker.engine.publish import workspace
from stoker.engine.reader import Engine

FORK = multiprocessing.get_context("fork")  # a fresh interpreter needs seconds for its imports


def request_engine(checkpoint: Path, answers: Connection, gate: Connection | None = None) -> None:
    """Get the engine from the cache. Sends "began" when this process builds it; it then waits for a message on `gate`, if given."""
    torch.set_num_threads(1)
    seen: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage != "read" and not seen:  # the fingerprint is computed before the lock is acquired
            seen.append(stage)
            answers.send(("began", os.getpid()))
            if gate is not None:
                gate.recv()

    answers.send(("path", str(build_cached(checkpoint, verify="files", progress=progress).path)))


def start_process(checkpoint: Path, gate: Connection | None = None) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    here, there = FORK.Pipe()
    process = FORK.Process(target=request_engine, args=(checkpoint, there, gate))
    process.start()
    there.close()
    return process, here


def collect(process: multiprocessing.process.BaseProcess, pipe: Connection) -> list[tuple[str, object]]:
    """All messages of the process until it ended."""
    messages = []
    while pipe.poll(60):
        try:
            messages.append(pipe.recv())
        except EOFError:
            break
    process.join(60)
    return messages


def test_ten_processes_share_one_build(llama: Path) -> None:
    processes = [start_process(llama) for _ in range(10)]
    messages = [message for process in processes for message in collect(*process)]
    assert all(process.exitcode == 0 for process, _ in processes)
    assert sum(kind == "began" for kind, _ in messages) == 1
    (path,) = {value for kind, value in messages if kind == "path"}
    Engine.open(str(path), verify=True)


def test_an_engine_is_built_again_after_its_build_was_killed(llama: Path) -> None:
    gate, _other_end = FORK.Pipe()
    first, pipe = start_process(llama, gate)
    assert pipe.recv() == ("began", first.pid)
    waiting, other = start_process(llama)
    assert not other.poll(0.2), "the second process did not wait for the lock"
    os.kill(first.pid or 0, signal.SIGKILL)
    messages = collect(waiting, other)
    first.join(60)
    assert first.exitcode == -signal.SIGKILL and waiting.exitcode == 0
    assert [kind for kind, _ in messages] == ["began", "path"]
    path = Path(str(messages[-1][1]))
    Engine.open(path, verify=True)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_a_failed_build_leaves_the_cache_empty(llama: Path, tmp_path: Path) -> None:
    config = add_fingerprint(prepare(llama, BuildConfig())).config

    def fail(path: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_engine(config, fail)
    engine = build_cached(llama, verify="files")
    assert engine.path.name == content_address(config)
    made: list[Path] = []
    assert cached_engine(engine.config, made.append).path == engine.path and made == []


def test_workspaces_are_removed_by_process_start_time_not_by_process_id(tmp_path: Path) -> None:
    """In a restarted container, the killed build had the same host name and process id as this one."""
    out = tmp_path / "engine"
    with workspace(out) as work:
        (work / "half").touch()
        name = work.name
        with workspace(tmp_path / "other"):
            assert work.exists()
    host_and_pid = name.rpartition(".")[0]
    dead = [tmp_path / f"{host_and_pid}.1", tmp_path / f"{host_and_pid}.1.old", tmp_path / f"{host_and_pid}0000000.1"]
    elsewhere = tmp_path / ".engine.building-another-host-1.1"
    for path in [*dead, elsewhere]:
        path.mkdir()
    replacing = tmp_path / f"{name}.old"
    replacing.mkdir()
    with workspace(out) as work:
        assert not any(path.exists() for path in dead) and elsewhere.exists() and replacing.exists()
        assert work.name == name and not list(work.iterdir())


def test_the_address_depends_on_content_only(llama: Path, tmp_path: Path) -> None:
    def address(path: Path, config: BuildConfig = BuildConfig()) -> str:
        return content_address(add_fingerprint(prepare(path, config)).config)

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert address(copy) == address(llama)
    assert address(llama, BuildConfig(dtype="float16")) != address(llama)
    assert address(llama, BuildConfig(dtype="float32", device="cpu")) == address(llama)
    (copy / "tokenizer_config.json").write_text("{}")
    assert address(copy) != address(llama)
