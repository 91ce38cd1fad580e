"""Stoker's KServe endpoints on real sockets, in a thread, with a scripted executor and a small real tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_executor import FakeExecutor, Script, info
from live_http import live_app
from small_tokenizers import small

from stoker.base.config import RuntimeConfig
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import Shutdown
from stoker.runtime.load import load_executor
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredService
from stoker.server.protocol import Context
from stoker.server.protocols.kserve.core import Core
from stoker.server.protocols.kserve.grpc.server import make_grpc_server
from stoker.server.settings import ServerSettings

TEXT = "The quick brown fox 你好 🎉 stop here"


def tokenizer() -> Tokenizer:
    return Tokenizer(small("byte_level"), {"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token_id": [2, 3]})


def generate_text(text: str = TEXT) -> Script:
    """Every sequence generates `text`, then the end id. Sequence i of several omits the last i tokens of the text."""
    ids = tokenizer().encode(text, add_special_tokens=False)
    return lambda request, index: [*ids[: len(ids) - index], 2]


def endless(request: Any, index: int) -> list[int]:
    return [10 + i % 200 for i in range(100_000)]


class RunningServer:
    """A running server, used from the thread of the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Any, core: Core, http: int, grpc: int) -> None:
        self.executor = executor
        self.core = core
        self.http = f"127.0.0.1:{http}"
        self.grpc = f"127.0.0.1:{grpc}"
        self._loop = loop

    def num_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(10)


@contextmanager
def running(
    script: Script | None = None, *, step_s: float = 0.0, options: Any = None, limits: dict[str, int] | None = None, **settings: Any
) -> Iterator[RunningServer]:
    """A server whose executor is scripted."""
    mailbox = InProcessMailbox(info(512, **{"max_input_len": 64, "max_output_len": 256, **(limits or {})}))
    executor = FakeExecutor(mailbox, script or generate_text(), step_s=step_s)
    try:
        with _serving(mailbox, executor, tokenizer(), options, settings) as server:
            yield server
    finally:
        executor.stop()


@contextmanager
def running_engine(engine: Path, *, options: Any = None, **settings: Any) -> Iterator[RunningServer]:
    """A server with an engine on the CPU."""
    executor = load_executor(engine, RuntimeConfig(device="cpu", kv_cache_tokens=2048), InProcessMailbox)
    thread = threading.Thread(target=executor.run)
    thread.start()
    try:
        with _serving(executor.mailbox, executor, Tokenizer.load(engine), options, settings) as server:
            yield server
    finally:
        executor.mailbox.put(Shutdown(drain=False))
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def _serving(mailbox: Any, executor: Any, tokenizer: Tokenizer, options: Any, settings: dict[str, Any]) -> Iterator[RunningServer]:
    """The endpoints in front of an executor that is already running."""
    started, errors = threading.Event(), []
    state: dict[str, Any] = {}

    async def main() -> None:
        counts, repository = FrontendMetrics(), ModelRepository()
        service = GenerationService("tiny", tokenizer, InProcessClient(mailbox))

        async def load() -> MeteredService:
            return MeteredService(service, counts)

        async def unload(_: Any) -> None:
            await service.close()

        repository.register("tiny", load, unload)
        await repository.load("tiny")
        context = Context(repository, ServerSettings(options=options, **settings), counts)
        grpc_server = make_grpc_server(context, "127.0.0.1:0")
        await grpc_server.start()
        stop = state["stop"] = asyncio.Event()
        async with live_app(make_app(context), context.settings) as port:
            state["running"] = RunningServer(asyncio.get_running_loop(), executor, Core.of(context), port, grpc_server.port)
            state["loop"] = asyncio.get_running_loop()
            started.set()
            await stop.wait()
            await grpc_server.stop(None)
        await repository.unload("tiny")
        context.cleanup.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)
            started.set()
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(30) and not errors, errors
        yield state["running"]
    finally:
        if "loop" in state:
            state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(30)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(f"the condition was not true within {seconds} s")
