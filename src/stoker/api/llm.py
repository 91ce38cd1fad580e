"""`stoker.LLM`: runs a model in the current process, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Unpack, overload

import msgspec

from stoker.api.prepare import prepare_model
from stoker.api.progress import shown_progress
from stoker.api.prompts import Conversation, Prompt, as_conversations, as_params, as_prompts
from stoker.api.settings import LLMSettings, read_settings
from stoker.base.config import RuntimeConfig
from stoker.base.types import Delta, GenerationRequest, SamplingParams
from stoker.deploy.prepare import Progress
from stoker.frontend.generation import GenerationService
from stoker.frontend.in_process_engine import InProcessEngine
from stoker.frontend.service import Completion
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.request import ExecutorStats

OnFinish = Callable[[Completion], None]


def _signature() -> inspect.Signature:
    """The signature of LLM with all settings, for `help` and for completion in notebooks."""
    own = [p for p in inspect.signature(LLM.__init__).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD][1:]
    defaults = msgspec.structs.asdict(RuntimeConfig())
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=hint)
        for name, hint in typing.get_type_hints(LLMSettings).items()
    ]
    return inspect.Signature([*own, *settings])


T = TypeVar("T")


class LLM:
    """A model loaded in this process. Usable as a context manager.

        with LLM("org/name") as llm:
            print(llm.generate("The capital of Japan is", SamplingParams(max_tokens=8)).choices[0].text)

    The step loop runs in its own thread. Prompts of one call, and of several threads, are batched in flight.

    Args:
        model: An engine, a checkpoint folder, a .gguf file, a Triton, LMI or Truss folder, a hub id, an archive, or an s3:// or https://
            address. The engine of a checkpoint is built once and cached.
        tokenizer: A folder or hub id with the tokenizer. Default: that of the model.
        progress: Whether progress is shown on stderr while files are fetched and the engine is built. A function receives (stage, done,
            total or None) instead, from several threads.
        settings: `help(stoker.LLMSettings)` describes all keyword arguments. vLLM's names are accepted where they mean the same.

    Raises:
        ConfigError for a setting that is not supported; for a wrong name or type it is also a TypeError. CheckpointError for a checkpoint
        that is absent or damaged. EngineError for an engine that cannot run on this machine.
    """

    __signature__: ClassVar[inspect.Signature]

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | Path | None = None,
        *,
        progress: Progress | bool = True,
        **settings: Unpack[LLMSettings],
    ) -> None:
        choices = read_settings(settings)
        with shown_progress("preparing") if progress is True else nullcontext(progress or None) as report:
            prepared = prepare_model(model, tokenizer, choices, report)
        self._engine = InProcessEngine(
            prepared.path, prepared.config, tokenizer=prepared.tokenizer, limits=prepared.limits, name=prepared.name
        )  # fmt: skip
        self._numbers = itertools.count()
        self._seeds = random.Random(choices.seed) if choices.seed is not None else None

    @property
    def service(self) -> GenerationService:
        """The generation service of the model. Its coroutines run on the event loop of this LLM only."""
        return self._engine.service

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._engine.tokenizer

    @overload
    def generate(self, prompts: Prompt, params: SamplingParams | None = None, on_finish: OnFinish | None = None) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[Prompt] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[Completion]: ...

    def generate(self, prompts: Any, params: Any = None, on_finish: OnFinish | None = None) -> Any:
        """The completion of one prompt, or a list of completions for a list of prompts.

        Args:
            prompts: A prompt is text or a list of token ids.
            params: One value for all prompts, or a list of the same length.
            on_finish: Called with each completion when it ends.

        Raises:
            RequestError for the first prompt that is refused; the other prompts are cancelled. It is also a TypeError for a value of a
            wrong type.
        """
        batch, single = as_prompts(prompts)
        requests = [self._request(prompt, own) for prompt, own in zip(batch, as_params(params, len(batch)), strict=True)]
        completions = self._engine.call(self._complete_all(requests, on_finish))
        return completions[0] if single else completions

    @overload
    def chat(
        self, messages: Conversation, params: SamplingParams | None = None, on_finish: OnFinish | None = None, **template_values: Any
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: list[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: OnFinish | None = None,
        **template_values: Any,
    ) -> list[Completion]: ...

    def chat(self, messages: Any, params: Any = None, on_finish: OnFinish | None = None, **template_values: Any) -> Any:
        """The completion of a conversation, or a list of completions for a list of conversations.

        A conversation is a list of messages with `role` and `content`, rendered with the chat template of the model. `template_values` are
        variables of the template, such as `tools` and `enable_thinking`. The other arguments and the errors are those of `generate`.
        """
        conversations, single = as_conversations(messages)
        prompts = [self.chat_prompt(conversation, **template_values) for conversation in conversations]
        completions = self.generate(prompts, params, on_finish)
        return completions[0] if single else completions

    def chat_prompt(self, messages: Conversation, **template_values: Any) -> list[int]:
        """The token ids of a conversation, a prompt for `generate` or `stream`."""
        text = self.run(self.service.render_chat(messages, **template_values))
        return self.service.encode(text, add_special_tokens=False)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Deltas of the sequences of one prompt as they arrive. Closing the iterator early cancels the request within one step."""
        batch, _ = as_prompts([prompt])
        request = self._request(batch[0], as_params(params, 1)[0])
        arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        producer = self._engine.submit(self._produce(request, asyncio.get_running_loop(), arrived))
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            producer.cancel()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses `service`. It runs in the event loop of the service."""
        return self._engine.call(coroutine)

    def stats(self) -> ExecutorStats:
        """The counters of the executor."""
        return self._engine.call(self.service.stats())

    def close(self) -> None:
        """Cancel running requests, stop the threads and free the memory. Further calls have no effect."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        """A request with a new id. If the LLM has a seed, requests without one get a seed derived from it."""
        if self._seeds is not None and params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        return GenerationRequest(request_id=str(next(self._numbers)), prompt=prompt, params=params)

    async def _complete_all(self, requests: list[GenerationRequest], on_finish: OnFinish | None) -> list[Completion]:
        """Run all requests at once, and call `on_finish` with each completion when it ends. Returns the completions in order.

        The first error cancels the other requests and is raised.
        """

        async def one(request: GenerationRequest) -> Completion:
            """Complete one request and report it."""
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
        """Stream the deltas to `arrived` in the caller's event loop, then None, or the exception that ended the stream."""
        last: Exception | None = None
        try:
            async for deltas in self.service.stream(request):
                for delta in deltas:
                    caller.call_soon_threadsafe(arrived.put_nowait, delta)
        except Exception as error:
            last = error
        caller.call_soon_threadsafe(arrived.put_nowait, last)


LLM.__signature__ = _signature()
