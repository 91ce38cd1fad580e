"""`stoker.LLM`: runs an engine in the current process, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, overload

from stoker.base.config import RuntimeConfig
from stoker.base.errors import UnavailableError
from stoker.base.types import Delta, GenerationRequest, SamplingParams
from stoker.engine.reader import Engine
from stoker.frontend.generation import GenerationService
from stoker.frontend.service import Completion
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import Shutdown
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.request import ExecutorStats
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox

ABORT_TIMEOUT_S = 10.0  # to wait for the executor thread after an interrupted load

T = TypeVar("T")
Prompt = str | list[int]


class LLM:
    """An engine loaded in this process. Usable as a context manager.

        with LLM("engine") as llm:
            print(llm.generate("The capital of Japan is", SamplingParams(max_tokens=8)).choices[0].text)

    The step loop runs in its own thread. Prompts of one call, and of several threads, are batched in flight.
    `settings` are fields of RuntimeConfig. Raises EngineError or ConfigError when the engine cannot run on this machine.
    """

    def __init__(self, engine: str | Path, **settings: Any) -> None:
        self.config = RuntimeConfig(**settings)
        Engine.open(engine)  # raises for a wrong or damaged directory before single files of it are read
        self.tokenizer = Tokenizer.load(engine)
        self._ids = itertools.count()
        loaded: Future[Executor] = Future()
        self._executor_thread = threading.Thread(target=self._run_executor, args=(engine, loaded), name="stoker-executor", daemon=True)
        self._executor_thread.start()
        try:
            self._executor = loaded.result()
        except BaseException:
            self._abort_load(loaded)
            raise
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="stoker-frontend", daemon=True)
        self._loop_thread.start()
        self.service: GenerationService = self._call(self._make_service(Path(engine).name))
        self._closed = False

    def _run_executor(self, engine: str | Path, loaded: Future[Executor]) -> None:
        """Load the engine and run the step loop on the same thread.

        OpenMP creates a team of threads for each thread that ever computed. With more threads than cores, waiting threads sleep instead
        of spinning: on two cores, a step of SmolLM2 in int8 took 17.5 ms when another thread had loaded the engine, and 8.8 ms when not.
        """
        try:
            executor = load_executor(engine, self.config, InProcessMailbox)
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
        """End the executor thread after a failed or interrupted load. Python would abort the process if it ran library code at exit."""
        thread = self._executor_thread
        if loaded.cancel():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        elif loaded.exception() is None:
            _shut_down(loaded.result())
        thread.join(ABORT_TIMEOUT_S)

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[Prompt] | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        on_finish: Callable[[Completion], None] | None = None,
    ) -> list[Completion]: ...

    def generate(self, prompts: Any, params: Any = None, on_finish: Callable[[Completion], None] | None = None) -> Any:
        """The completion of one prompt, or a list of completions for a list of prompts. A prompt is text or a list of token ids.

        `params` is one value for all prompts, or a list of the same length. `on_finish` is called with each completion when it ends.
        Raises RequestError for the first prompt that is refused; the other prompts are cancelled.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))  # text or token ids
        batch: list[Prompt] = [prompts] if single else list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(batch)
        requests = [self._request(prompt, own) for prompt, own in zip(batch, each, strict=True)]
        completions = self._call(self._complete_all(requests, on_finish))
        return completions[0] if single else completions

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None, **template_values: Any) -> Completion:
        """The completion of a conversation, rendered with the chat template of the model."""
        return self.generate(self.chat_prompt(messages, **template_values), params)

    def chat_prompt(self, messages: list[dict[str, Any]], **template_values: Any) -> list[int]:
        """The token ids of a conversation, a prompt for `generate` or `stream`."""
        text = self.service.render_chat(messages, **template_values)
        return self.service.encode(text, add_special_tokens=False)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Deltas of the sequences of one prompt as they arrive. Closing the iterator early cancels the request within one step."""
        arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        caller = asyncio.get_running_loop()
        producer = self._submit(self._produce(self._request(prompt, params or SamplingParams()), caller, arrived))
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            producer.cancel()

    def stats(self) -> ExecutorStats:
        """The counters of the executor."""
        return self._call(self.service.stats())

    def close(self) -> None:
        """Cancel running requests, stop the threads and free the memory. Further calls have no effect."""
        if self._closed:
            return
        self._closed = True
        _shut_down(self._executor)
        self._executor_thread.join()
        self._submit(self.service.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        del self._executor

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _make_service(self, name: str) -> GenerationService:
        mailbox = self._executor.mailbox
        assert isinstance(mailbox, InProcessMailbox)
        return GenerationService(name, self.tokenizer, InProcessClient(mailbox))

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        return GenerationRequest(request_id=str(next(self._ids)), prompt=prompt, params=params)

    async def _complete_all(self, requests: list[GenerationRequest], on_finish: Callable[[Completion], None] | None) -> list[Completion]:
        async def one(request: GenerationRequest) -> Completion:
            completion = await self.service.complete(request)
            if on_finish is not None:
                on_finish(completion)
            return completion

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _produce(
        self, request: GenerationRequest, caller: asyncio.AbstractEventLoop, arrived: asyncio.Queue[Delta | Exception | None]
    ) -> None:
        last: Exception | None = None
        try:
            async for deltas in self.service.stream(request):
                for delta in deltas:
                    caller.call_soon_threadsafe(arrived.put_nowait, delta)
        except Exception as error:
            last = error
        caller.call_soon_threadsafe(arrived.put_nowait, last)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if getattr(self, "_closed", False):
            coroutine.close()
            raise UnavailableError("This LLM was closed.", cure="Create a new LLM.")
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseException:  # such as KeyboardInterrupt: cancel the request
            future.cancel()
            raise


def _shut_down(executor: Executor) -> None:
    mailbox = executor.mailbox
    assert isinstance(mailbox, InProcessMailbox)
    mailbox.put(Shutdown(drain=False))
