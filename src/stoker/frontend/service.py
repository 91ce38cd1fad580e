"""The generation service: text in, text deltas out. Protocol adapters call this and nothing below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from stoker.base.types import Delta, FinishReason, GenerationRequest, TokenLogprobs, Usage
from stoker.runtime.client import ExecutorInfo
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


class Completion(msgspec.Struct):
    """The whole answer to a request. Equal to the joined deltas of its stream."""

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


class Service(ABC):
    """What a protocol adapter may ask of a model that is served."""

    model_name: str
    end_ids: tuple[int, ...] = ()  # the model's own, in the tokenizer's order
    pad_id: int | None = None  # the tokenizer's

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        """Deltas of the request's sequences, a list a wake-up. Leaving early cancels within one step.

        Raises RequestError, QueueFullError or UnavailableError before the first delta; later failures of one sequence
        come as its last delta, with finish_reason ERROR.
        """

    @abstractmethod
    async def complete(self, request: GenerationRequest) -> Completion:
        """The joined stream."""

    @abstractmethod
    def cancel(self, request_id: str) -> None: ...

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """One token's text alone, in UTF-8; part of a character where the token is only that. For log-probabilities."""

    @abstractmethod
    def render_chat(self, messages: list[dict[str, Any]], /, **template_values: Any) -> str:
        """The chat template's text for these messages (generation prompt added unless told otherwise). RequestError when it fails."""

    @abstractmethod
    async def stats(self) -> ExecutorStats: ...

    @property
    @abstractmethod
    def info(self) -> ExecutorInfo:
        """The engine's limits, vocabulary and architecture."""

    @property
    @abstractmethod
    def max_seq_len(self) -> int: ...

    @property
    @abstractmethod
    def ready(self) -> bool: ...
