"""The interface of the generation service: text requests in, text deltas out. Protocols use this interface only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from stoker.base.profile_query import ProfileResult
from stoker.base.types import AdmissionRecord, Delta, FinishReason, GenerationRequest, PrefillChunk, Timings, TokenLogprobs, Usage
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.live_state import LiveState
from stoker.runtime.request import ExecutorStats


class Choice(msgspec.Struct):
    """One finished sequence."""

    index: int
    """Number of the sequence (or beam) among those of the request, from 0."""

    text: str
    """The generated text, without the prompt."""

    token_ids: list[int]
    """The generated token ids."""

    finish_reason: FinishReason
    """Why the sequence ended."""

    stop_reason: int | str | None = None
    """The stop id or stop string that ended it."""

    logprobs: list[TokenLogprobs] = []
    """One entry per token, when requested."""

    error: str | None = None
    """The message when `finish_reason` is ERROR."""

    admission: AdmissionRecord | None = None
    """When the sequence was admitted, and its KV cache blocks. None if it was never admitted."""

    draft_tokens: int = 0
    """Draft tokens that were verified."""

    accepted_draft_tokens: int = 0
    """Those of the draft tokens that were accepted."""

    prefill_chunks: list[PrefillChunk] = []
    """The steps that computed the prompt, if the request is traced."""


class Completion(msgspec.Struct):
    """The whole answer to a request. Equal to all deltas of its stream together."""

    request_id: str
    """The id of the request."""

    prompt_token_ids: list[int]
    """Token ids of the prompt, after truncation."""

    choices: list[Choice]
    """One per sequence or beam, in the order of their index."""

    usage: Usage
    """Token counts."""

    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, when requested; None for the first token."""

    timings: Timings | None = None
    """Time in the queue, time to first token, and speed. None only for answers that the server combined from several requests."""


class Service(ABC):
    """One served model, as protocols see it."""

    model_name: str
    end_ids: tuple[int, ...] = ()  # of the model, in the order of the tokenizer files
    pad_id: int | None = None  # of the tokenizer
    chat_template: str | None = None  # its source; None: the model has none, and `render_chat` raises

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        """Run a request, and yield the deltas of its sequences; one list contains all deltas that arrived together.

        Closing the generator early cancels the request within one step. Raises RequestError, QueueFullError or UnavailableError before the
        first delta. A later failure of a sequence is its last delta, with finish_reason ERROR.
        """

    @abstractmethod
    async def complete(self, request: GenerationRequest) -> Completion:
        """Run a request, and return its completion, which equals all deltas of `stream` together. Raises the same errors as `stream`."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Cancel a request within one step. An unknown id is ignored."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Raises RequestError when it is too long or invalid Unicode."""

    @abstractmethod
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises RequestError for an id outside the vocabulary."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, for log-probabilities. They may be only a part of a character."""

    @abstractmethod
    async def render_chat(self, messages: list[dict[str, Any]], /, **template_values: Any) -> str:
        """The prompt for these messages, by the chat template; by default with the generation prompt.

        Raises RequestError, also for a template that exceeds its limits of time and memory.

        `template_values` are options and variables of `ChatTemplate.variables`.
        """

    @abstractmethod
    async def stats(self) -> ExecutorStats:
        """The current statistics of the executor. Raises UnavailableError."""

    @abstractmethod
    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        """Profile the executor's next steps, or those that run within `time_s` seconds. Raises UnavailableError."""

    @abstractmethod
    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        """The executor's sequences, KV blocks, steps and log, as `LiveQuery` requests them. Raises UnavailableError."""

    @property
    @abstractmethod
    def info(self) -> ExecutorInfo:
        """Limits, vocabulary size and architecture of the engine."""

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """The largest number of prompt and output tokens of a sequence."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether the service accepts requests and its executor responds."""
