"""How `stoker.LLM` starts: on which thread, and that a failed start leaves no thread."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stoker import LLM, SamplingParams
from stoker.base.errors import ConfigError
from stoker.frontend import in_process_engine as module
from stoker.runtime.executor import Executor


def executor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stoker-executor"]


def test_an_engine_is_loaded_by_the_thread_that_runs_it(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP has a team per thread that computed, and CUDA a current device per thread."""
    load, run, thread_ids = module.load_executor, Executor.run, list[int]()

    def recording_load(*args: Any, **settings: Any) -> Executor:
        thread_ids.append(threading.get_ident())
        return load(*args, **settings)

    def recording_run(self: Executor) -> None:
        thread_ids.append(threading.get_ident())
        run(self)

    monkeypatch.setattr(module, "load_executor", recording_load)
    monkeypatch.setattr(Executor, "run", recording_run)
    with LLM(tiny_engine, kv_cache_tokens=256) as llm:
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
    assert len(thread_ids) == 2 and thread_ids[0] == thread_ids[1] != threading.get_ident()


def test_an_engine_that_does_not_load_leaves_no_thread(tiny_engine: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 is refused"):
        LLM(tiny_engine, kv_cache_dtype="int8")
    assert not any(thread.is_alive() for thread in executor_threads())


@pytest.mark.parametrize("moment", ["while loading", "after loading", "while running"])
def test_an_interrupted_load_leaves_no_thread(tiny_engine: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, close, result, loading, closed = module.load_executor, Executor.close, Future.result, threading.Event(), list[Executor]()

    def slow_load(*args: Any, **settings: Any) -> Executor:
        loading.set()
        try:
            while moment != "while running":
                time.sleep(0.001)
        except SystemExit:
            if moment == "while loading":
                raise
        return load(*args, **settings)

    def recording_close(executor: Executor, *args: Any) -> None:
        closed.append(executor)
        close(executor, *args)

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        patch.undo()
        assert loading.wait(30)
        if moment == "while running":
            result(future)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load_executor", slow_load)
    monkeypatch.setattr(Executor, "close", recording_close)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", interrupted)
        LLM(tiny_engine, kv_cache_tokens=256)
    assert not any(thread.is_alive() for thread in executor_threads())
    assert len(closed) == (0 if moment == "while loading" else 1)
