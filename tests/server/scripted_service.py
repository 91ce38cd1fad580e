"""A generation service with scripted answers. Its tokens are the bytes of UTF-8 text."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from stoker.base.config import Limits
from stoker.base.errors import RequestError, StokerError
from stoker.base.profile_query import ProfileResult
from stoker.base.types import Delta, FinishReason, GenerationRequest, Timings, TokenLogprobs, Usage
from stoker.frontend.chat_messages import check_messages
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Choice, Completion, Service
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.live_state import LiveState
from stoker.runtime.request import ExecutorStats
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredService
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

CACHED = 2  # prompt tokens that every request reuses


class ScriptedService(Service):
    """Sequence i of a request generates answers[i % len(answers)], one byte per token and `group` tokens per delta."""

    def __init__(self, *answers: str, name: str = "tiny", group: int = 1, **limits: int) -> None:
        self.model_name = name
        self.chat_template = "a scripted template"
        self.answers = list(answers) or ["Hello, wörld 🎉!"]
        self.group = group
        self.requests: list[GenerationRequest] = []
        self.rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.left: list[str] = []  # ids of requests whose stream was closed before its end
        self.error: StokerError | None = None  # raised before the first delta
        self.fails_after: int | None = None  # number of deltas after which a sequence ends with ERROR
        self.hold: asyncio.Event | None = None  # each delta waits for this event
        self.num_streaming = 0
        self.profile_folder: Path | None = None  # where profiles are written
        self.is_ready = True
        self.timings: Timings | None = None  # of every request
        checked = Limits(**{"max_input_len": 256, "max_output_len": 128, **limits})
        self._info = ExecutorInfo(
            limits=checked, max_seq_len=checked.max_seq_len, vocab_size=256, device="cpu", kv_cache_tokens=4096, model="Scripted"
        )

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        prompt = self._accept(request)
        usage = Usage(len(prompt), 0, CACHED)
        plans = [self._plan(request, i) for i in range(request.params.n)]
        first, finished = True, False
        self.num_streaming += 1
        try:
            while any(plans):
                if self.hold is not None:
                    await self.hold.wait()
                await asyncio.sleep(0)
                batch = [plan.pop(0) for plan in plans if plan]
                if first:
                    batch[0].usage = usage
                    if request.params.prompt_logprobs is not None:
                        batch[0].prompt_logprobs = self._prompt_logprobs(prompt, request.params.prompt_logprobs)
                usage.completion_tokens += sum(len(delta.token_ids) for delta in batch)
                if not any(plans):
                    batch[-1].usage, batch[-1].timings, finished = usage, self.timings, True
                yield batch
                if first:
                    batch[0].usage, usage = batch[0].usage, Usage(usage.prompt_tokens, usage.completion_tokens, CACHED)
                first = False
        finally:
            self.num_streaming -= 1
            if not finished:
                self.left.append(request.request_id)

    async def complete(self, request: GenerationRequest) -> Completion:
        choices = [Choice(i, "", [], FinishReason.CANCELLED) for i in range(request.params.n)]
        usage, prompt_logprobs = Usage(), None
        async for batch in self.stream(request):
            for delta in batch:
                choice = choices[delta.index]
                choice.text += delta.text
                choice.token_ids = choice.token_ids + delta.token_ids
                choice.logprobs = choice.logprobs + delta.logprobs
                if delta.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
                usage = delta.usage or usage
                prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
        return Completion(request.request_id, self._ids(request), choices, usage, prompt_logprobs, timings=self.timings)

    def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > self.info.limits.max_input_len * 8:
            raise RequestError("prompt", text, f"it has {len(text)} characters and the limit is {self.info.limits.max_input_len * 8}")
        return [*([2] if add_special_tokens else []), *text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token % 256 for token in token_ids if token != 2).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id % 256])

    async def render_chat(self, messages: list[dict[str, Any]], /, **template_values: Any) -> str:
        self.rendered.append((messages, template_values))
        checked = check_messages(messages, max_chars=self.info.limits.max_input_len * 8)
        return "".join(f"<{message['role']}>{message['content']}" for message in checked) + template_values.get("ending", "<assistant>")

    async def stats(self) -> ExecutorStats:
        return ExecutorStats(num_running=self.num_streaming, num_blocks=10, num_free_blocks=7, max_batch_size=4, num_steps=5, row_steps=10)

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        if self.profile_folder is None:
            return ProfileResult(error="no step ran")
        (self.profile_folder / "trace.json").write_text('{"traceEvents": []}')
        return ProfileResult(str(self.profile_folder / "trace.json"), num_steps)

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        return LiveState(await self.stats(), 0.0, 0.0, [], [], [], [], [], 0, [], {})

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def max_seq_len(self) -> int:
        return self._info.max_seq_len

    @property
    def ready(self) -> bool:
        return self.is_ready

    def _accept(self, request: GenerationRequest) -> list[int]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        prompt = self._ids(request)
        if len(prompt) > self.info.limits.max_input_len:
            raise RequestError("prompt", prompt, f"it has {len(prompt)} tokens and max_input_len is {self.info.limits.max_input_len}")
        return prompt

    def _ids(self, request: GenerationRequest) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        return self.encode(request.prompt, add_special_tokens=request.add_special_tokens)

    def _plan(self, request: GenerationRequest, index: int) -> list[Delta]:
        """The deltas of one sequence. As with the real detokenizer, text consists of whole characters."""
        params = request.params
        ids = list(self.answers[index % len(self.answers)].encode())
        reason = FinishReason.STOP if len(ids) <= params.max_tokens else FinishReason.LENGTH
        ids = ids[: params.max_tokens]
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        deltas = []
        for start in range(0, len(ids), self.group):
            new = ids[start : start + self.group]
            deltas.append(Delta(index, decode(bytes(new)), new, self._scores(new, params.logprobs, index)))
        deltas = deltas or [Delta(index)]
        deltas[-1].text += decode(b"", True)
        deltas[-1].finish_reason = reason
        if self.fails_after is not None:
            deltas = [*deltas[: self.fails_after], Delta(index, finish_reason=FinishReason.ERROR, error="the step failed.")]
        return deltas

    def _scores(self, ids: list[int], top: int | None, index: int) -> list[TokenLogprobs]:
        """The tokens of sequence i have the log-probability -(i + 1) ÷ 4."""
        if top is None:
            return []
        score = -(index + 1) / 4
        return [TokenLogprobs(token, score, [(token, score), ((token + 1) % 128, score - 1)][:top]) for token in ids]

    def _prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprobs | None]:
        return [None, *self._scores(prompt[1:], top, 0)]


async def make_context(*services: Service, **settings: Any) -> Context:
    """A context whose models are loaded."""
    counts, repository = FrontendMetrics(), ModelRepository()

    async def unload(service: Service) -> None:
        pass

    for service in services:

        async def load(service: Service = service) -> Service:
            return MeteredService(service, counts)

        repository.register(service.model_name, load, unload)
        await repository.load(service.model_name)
    return Context(repository, ServerSettings(**settings), counts)


async def make_asgi(*services: Service, **settings: Any) -> Any:
    return make_app(await make_context(*services, **settings))
