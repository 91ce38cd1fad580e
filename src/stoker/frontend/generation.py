"""The generation service: checks and tokenizes a request, runs it on the executor, and turns its tokens into text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.base.config import RequestLimits
from stoker.base.errors import RequestError, UnavailableError
from stoker.base.profile_query import ProfileResult
from stoker.base.types import Delta, GenerationRequest
from stoker.frontend.active_request import ActiveRequest
from stoker.frontend.admission import check_ids, check_prompt, check_request, lower_limits
from stoker.frontend.aggregation import Aggregator
from stoker.frontend.bad_words import bad_word_ids
from stoker.frontend.beam_search import BeamDriver, check_beams
from stoker.frontend.executor_errors import raise_refusal
from stoker.frontend.prompt_transfer import with_ticket
from stoker.frontend.prompts import INLINE_CHARS, truncate_prompt
from stoker.frontend.rendering.renderer import ChatRenderer
from stoker.frontend.retry import Retry
from stoker.frontend.service import Completion, Service
from stoker.frontend.stopwatch import Stopwatch
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import ExecutorClient, ExecutorInfo
from stoker.runtime.live_state import LiveState
from stoker.runtime.request import ExecutorStats, TokenRequest

TOKENIZER_THREADS = 4


class GenerationService(Service):
    """One model: a tokenizer and the executor that runs the engine. Use it from one event loop only.

    With `retry_unstarted`, requests of a failed executor run again on the next one, unless something was sent to their clients.
    """

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        client: ExecutorClient,
        limits: RequestLimits = RequestLimits(),
        *,
        retry_unstarted: bool = False,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.end_ids, self.pad_id = tokenizer.end_ids, tokenizer.pad_id
        self.chat_template = tokenizer.chat_template or None
        self._client = client
        self._limits = limits
        self._retry_unstarted = retry_unstarted
        self._executor_info, self._info = client.info, lower_limits(client.info, limits)
        self._chat = ChatRenderer(tokenizer.chat_template, tokenizer.special_tokens) if tokenizer.chat_template else None
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._beams: dict[str, BeamDriver] = {}
        self.num_active = 0  # running requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def info(self) -> ExecutorInfo:
        if self._client.info is not self._executor_info:  # the executor was started again
            self._executor_info, self._info = self._client.info, lower_limits(self._client.info, self._limits)
        return self._info

    @property
    def max_seq_len(self) -> int:
        return self.info.max_seq_len

    @property
    def ready(self) -> bool:
        """Whether the executor answers, and no drain has begun."""
        return self._client.alive and not self._draining

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        """Generate, and yield the deltas that arrive together.

        Raises RequestError, also for beam search, QueueFullError and UnavailableError.
        """
        if request.params.beam_width > 1:
            raise RequestError(
                "beam_width", request.params.beam_width, "beams are not streamed", cure="Send the request without streaming."
            )
        with _Active(self):
            stopwatch = Stopwatch()
            task = await self._prepare(request, stopwatch)
            async with aclosing(self._deltas(task, stopwatch)) as stream:
                async for deltas in stream:
                    yield deltas

    async def complete(self, request: GenerationRequest) -> Completion:
        """Generate, and return the whole answer. Raises RequestError, QueueFullError and UnavailableError."""
        with _Active(self):
            if request.params.beam_width > 1:
                check_beams(request.params, self.tokenizer.end_ids)
            stopwatch = Stopwatch()
            task = await self._prepare(request, stopwatch)
            if task.params.beam_width > 1:
                return await self._search_beams(task, stopwatch)
            return await self._join(task, stopwatch)

    def cancel(self, request_id: str) -> None:
        """End a request. Its sequences end with FinishReason.CANCELLED. Unknown ids are ignored."""
        if (driver := self._beams.get(request_id)) is not None:
            driver.cancel()
        self._client.cancel(request_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.tokenizer.check_length(text, self.max_seq_len)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        check_ids("token_ids", token_ids, self.info.vocab_size)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be only a part of a character; empty for an unknown id."""
        return self.tokenizer.token_bytes(token_id)

    async def render_chat(self, messages: list[dict[str, Any]], /, **template_values: Any) -> str:
        """The prompt of a conversation. Raises RequestError if the model has no chat template, or the template refuses the messages."""
        if self._chat is None:
            raise RequestError("messages", messages, f"{self.model_name} has no chat template", cure="Send a prompt instead.")
        max_chars = self.info.limits.max_input_len * self.tokenizer.max_token_chars
        return await self._chat.render(messages, max_chars=max_chars, **template_values)

    async def stats(self) -> ExecutorStats:
        return await self._client.stats()

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        return await self._client.profile(num_steps, time_s)

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        return await self._client.live(detail=detail, first_step=first_step, log_after_s=log_after_s)

    async def drain(self) -> None:
        """Reject new requests, and wait until the running ones have ended."""
        self._draining = True
        await self._idle.wait()

    def end_requests(self, error: UnavailableError) -> None:
        """End all running requests with `error`, and refuse new ones with it. Those that have started end with FinishReason.ERROR."""
        self._client.end_requests(error)

    async def close(self) -> None:
        """Close the connection to the executor, and end the tokenizer threads and the process that renders chat templates."""
        self._draining = True
        if self._chat is not None:
            await self._chat.close()
        await self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, request: GenerationRequest, stopwatch: Stopwatch) -> TokenRequest:
        """The request with its prompt as token ids, checked against the limits of the engine. Raises RequestError.

        The time spent here counts towards its deadline.
        """
        request = self._with_bad_word_ids(request)
        check_request(request, self.info)
        prompt_ids = truncate_prompt(await self._prompt_ids(request), request.truncate_prompt_tokens, request.truncation_side)
        check_prompt(prompt_ids, request.params, self.info)
        stopwatch.prepared()
        left_s = None if request.timeout_s is None else max(0.0, request.timeout_s - (time.monotonic() - stopwatch.started))
        draft_ids = await self._prediction_ids(request)
        task = TokenRequest(
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            params=request.params,
            end_ids=() if request.params.ignore_eos else self.tokenizer.end_ids,
            priority=request.priority,
            timeout_s=left_s,
            cache_salt=request.cache_salt,
            max_drafts=request.draft_tokens,
            draft_ids=draft_ids,
            draft_logits=self._draft_logits(request, len(draft_ids)),
            traced=request.traced,
        )
        return await with_ticket(task, self._client)

    def _with_bad_word_ids(self, request: GenerationRequest) -> GenerationRequest:
        """The request, in which bad words that are strings are replaced by their token ids."""
        params = request.params
        words = [word for word in params.bad_words if isinstance(word, str)]
        if not words:
            return request
        ids = tuple(word for word in params.bad_words if not isinstance(word, str))
        params = msgspec.structs.replace(params, bad_words=(*bad_word_ids("bad_words", words, self), *ids))
        return msgspec.structs.replace(request, params=params)

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        """The token ids of the prompt. A long text is tokenized in a thread. Raises RequestError."""
        prompt = request.prompt
        if isinstance(prompt, list):
            return prompt
        if not isinstance(prompt, str):
            raise RequestError("prompt", prompt, "it must be a string or a list of token ids")
        self.tokenizer.check_length(prompt, self.info.limits.max_input_len)
        return await self._encode(prompt, add_special_tokens=request.add_special_tokens)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text of limited length. A long one is tokenized in a thread."""
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def _prediction_ids(self, request: GenerationRequest) -> list[int]:
        """The token ids of the prediction, at most as many as an answer may have. Empty without speculative decoding."""
        limit = self.info.limits.max_output_len
        if self.info.speculate == "none" or not request.prediction:
            return []
        if isinstance(request.prediction, list):
            return request.prediction[:limit]
        text = request.prediction[: limit * self.tokenizer.max_token_chars]
        return (await self._encode(text, add_special_tokens=False))[:limit]

    def _draft_logits(self, request: GenerationRequest, count: int) -> bytes:
        """The logits of the first `count` draft tokens. Empty unless drafts are those of the request only, as the logits assume."""
        return request.draft_logits[: 4 * count * self.info.vocab_size] if self.info.speculate == "request" else b""

    async def _deltas(self, task: TokenRequest, stopwatch: Stopwatch) -> AsyncGenerator[list[Delta], None]:
        """Run a checked request on the executor, and yield its deltas."""
        retry = self._retry(task)
        while True:
            request = ActiveRequest(retry.task, self.tokenizer, self._client, stopwatch)
            try:
                async with aclosing(self._client.generate(retry.task)) as batches:
                    async for outputs in batches:
                        if not request.started:
                            raise_refusal(outputs)
                        if deltas := request.push(outputs):
                            yield deltas
                        if request.finished:
                            return
                return
            except UnavailableError as error:
                if request.started:
                    yield request.fail(error)
                    return
                await retry.wait(error)

    async def _join(self, task: TokenRequest, stopwatch: Stopwatch) -> Completion:
        """Run a checked request on the executor, and return its completion.

        It is equal to the combined `_deltas`, and avoids the cost of that generator.
        """
        retry = self._retry(msgspec.structs.replace(task, whole=not task.params.stop))
        while True:
            request, aggregator = ActiveRequest(retry.task, self.tokenizer, self._client, stopwatch), Aggregator(task)
            try:
                async with aclosing(self._client.generate(retry.task)) as batches:
                    async for outputs in batches:
                        if not request.started:
                            raise_refusal(outputs)
                        aggregator.add(request.push(outputs))
                        if request.finished:
                            break
                return aggregator.completion()
            except UnavailableError as failure:
                try:
                    await retry.wait(failure)
                except UnavailableError as error:
                    if not request.started:
                        raise
                    aggregator.add(request.fail(error))
                    return aggregator.completion()
                stopwatch.forget_token()

    async def _search_beams(self, task: TokenRequest, stopwatch: Stopwatch) -> Completion:
        """Run a checked request with beam search. Raises RequestError for an id in flight."""
        retry = self._retry(task)
        while True:
            if task.request_id in self._beams:
                raise RequestError("request_id", task.request_id, "a request with this id is in flight", cure="Use a new id.")
            driver = self._beams[task.request_id] = BeamDriver(retry.task, self._client, self.tokenizer, stopwatch)
            try:
                return await driver.run()
            except UnavailableError as error:
                await retry.wait(error)
                stopwatch.forget_token()
            finally:
                del self._beams[task.request_id]

    def _retry(self, task: TokenRequest) -> Retry:
        """The runs of a checked request."""
        return Retry(self._client, task, enabled=self._retry_unstarted)


class _Active:
    """Counts a request inside its `with` block as running. Raises UnavailableError when the service is draining."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def __enter__(self) -> None:
        if self._service._draining:
            raise UnavailableError(f"{self._service.model_name} is draining.", cure="Retry on another server.")
        self._service.num_active += 1
        self._service._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._service.num_active -= 1
        if not self._service.num_active:
            self._service._idle.set()
