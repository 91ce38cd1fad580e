"""How `stoker.LLM` starts: on which thread, and what is left when it does not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stoker import LLM, SamplingParams
from stoker.base.errors import ConfigError
from stoker.frontend import llm as module
from stoker.runtime.executor import Executor


def executor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stoker-executor"]


def test_an_engine_is_loaded_by_the_thread_that_runs_it(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP has a team for each thread that computed, and CUDA a device for each thread."""
    load, run, seen = module.load_executor, Executor.run, list[int]()

    def loads(*given: Any) -> Executor:
        seen.append(threading.get_ident())
        return load(*given)

    def runs(self: Executor) -> None:
        seen.append(threading.get_ident())
        run(self)

    monkeypatch.setattr(module, "load_executor", loads)
    monkeypatch.setattr(Executor, "run", runs)
    with LLM(tiny_engine, kv_cache_tokens=256) as llm:
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
    assert len(seen) == 2 and seen[0] == seen[1] != threading.get_ident()


def test_an_engine_that_does_not_load_leaves_no_thread(tiny_engine: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8 is refused"):
        LLM(tiny_engine, kv_cache_dtype="int8")
    assert not any(thread.is_alive() for thread in executor_threads())


@pytest.mark.parametrize("moment", ["while it loads", "as it has loaded", "as it runs"])
def test_who_gives_up_leaves_no_thread(tiny_engine: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, close, result, loads, closed = module.load_executor, Executor.close, Future.result, threading.Event(), list[Executor]()

    def slow(*given: Any) -> Executor:
        loads.set()
        try:
            while moment != "as it runs":
                time.sleep(0.001)
        except SystemExit:
            if moment == "while it loads":
                raise
        return load(*given)

    def closes(executor: Executor) -> None:
        closed.append(executor)
        close(executor)

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        patch.undo()
        assert loads.wait(30)
        if moment == "as it runs":
            result(future)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load_executor", slow)
    monkeypatch.setattr(Executor, "close", closes)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", interrupted)
        LLM(tiny_engine, kv_cache_tokens=256)
    assert not any(thread.is_alive() for thread in executor_threads())
    assert len(closed) == (0 if moment == "while it loads" else 1)
