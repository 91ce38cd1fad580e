"""An engine that runs in this process: the executor in one thread, the event loop of its generation service in another."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from stoker.base.config import RequestLimits, RuntimeConfig
from stoker.base.errors import UnavailableError
from stoker.engine.reader import Engine
from stoker.frontend.generation import GenerationService
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import Shutdown
from stoker.runtime.executor import Executor
from stoker.runtime.expected_devices import expected_devices
from stoker.runtime.load import load_executor
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.runtime.worker_group.follower_process import WaitingFollowers

ABORT_TIMEOUT_S = 10.0  # to wait for the executor thread after an interrupted load

T = TypeVar("T")


class InProcessEngine:
    """The engine in directory `path`, loaded in this process. Its `service` may only be used through `call` and `submit`.

    `tokenizer` is the directory of the tokenizer, by default the engine. `name` is the name of the model in messages. Raises EngineError or
    ConfigError when the engine cannot run on this machine.
    """

    def __init__(
        self,
        path: Path,
        config: RuntimeConfig = RuntimeConfig(),
        *,
        tokenizer: Path | None = None,
        limits: RequestLimits = RequestLimits(),
        name: str | None = None,
    ) -> None:
        self.config = config
        with WaitingFollowers(expected_devices(path, config)[1:]) as waiting:
            Engine.open(path)  # raises for a wrong or damaged directory before single files of it are read
            self.tokenizer = Tokenizer.load(tokenizer or path)
            loaded: Future[Executor] = Future()
            self._executor_thread = threading.Thread(
                target=self._run_executor, args=(path, waiting, loaded), name="stoker-executor", daemon=True
            )
            self._executor_thread.start()
            try:
                self._executor = loaded.result()
            except BaseException:
                self._abort_load(loaded)
                raise
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="stoker-frontend", daemon=True)
        self._loop_thread.start()
        self.service: GenerationService = self.call(self._make_service(name or path.name, limits))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the event loop of the service."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the service, and return its result.

        It is cancelled when the wait is interrupted, such as by Ctrl-C. Raises UnavailableError after `close`.
        """
        if self._closed:
            coroutine.close()
            raise UnavailableError("This LLM was closed.", cure="Create a new LLM.")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel running requests, stop the threads and free the memory. Further calls have no effect."""
        if self._closed:
            return
        self._closed = True
        _shut_down(self._executor)
        self._executor_thread.join()
        self.submit(self.service.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        del self._executor

    def _run_executor(self, path: Path, waiting: WaitingFollowers, loaded: Future[Executor]) -> None:
        """Load the engine and run the step loop on the same thread.

        OpenMP creates a team of threads for each thread that ever computed. With more threads than cores, waiting threads sleep instead
        of spinning: on two cores, a step of SmolLM2 in int8 took 17.5 ms when another thread had loaded the engine, and 8.8 ms when not.
        """
        try:
            executor = load_executor(path, self.config, InProcessMailbox, waiting=waiting)
        except BaseException as error:
            if loaded.set_running_or_notify_cancel():
                loaded.set_exception(error)
            return
        if loaded.set_running_or_notify_cancel():
            loaded.set_result(executor)
            executor.run()
        else:
            executor.close()

    def _abort_load(self, loaded: Future[Executor]) -> None:
        """End the executor thread after a failed or interrupted load.

        Otherwise it could run library code at exit, and Python would abort.
        """
        thread = self._executor_thread
        if loaded.cancel():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        elif loaded.exception() is None:
            _shut_down(loaded.result())
        thread.join(ABORT_TIMEOUT_S)

    async def _make_service(self, name: str, limits: RequestLimits) -> GenerationService:
        """The generation service of the loaded executor. Runs on the event loop."""
        mailbox = self._executor.mailbox
        assert isinstance(mailbox, InProcessMailbox)
        return GenerationService(name, self.tokenizer, InProcessClient(mailbox), limits)


def _shut_down(executor: Executor) -> None:
    """End the executor's loop immediately."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, InProcessMailbox)
    mailbox.put(Shutdown(drain=False))
