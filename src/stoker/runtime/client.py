"""The one way to reach an executor, in this process or another: submit token ids, receive outputs, cancel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

import msgspec

from stoker.base.config import Limits
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest


class ExecutorInfo(msgspec.Struct, kw_only=True):
    """What a frontend must know of an executor to check requests."""

    limits: Limits
    max_seq_len: int  # tokens of one sequence: the engine's limit, the model's positions and the KV cache, the smallest
    vocab_size: int
    device: str
    kv_cache_tokens: int
    model: str  # architecture name


class ExecutorClient(ABC):
    """Submit, stream, cancel. Safe for many concurrent requests of one event loop."""

    info: ExecutorInfo

    @abstractmethod
    def generate(self, request: TokenRequest) -> AsyncIterator[list[SequenceOutput]]:
        """Outputs of the request's sequences, a list a wake-up, until each has a finish_reason.

        Leaving the iterator early (break, cancellation, close) cancels the request within one step. Errors of the
        request come as outputs with finish_reason ERROR; UnavailableError is raised when the executor is gone.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request; its sequences get finish_reason CANCELLED. An unknown id is ignored."""

    @abstractmethod
    async def stats(self) -> ExecutorStats: ...

    @abstractmethod
    def pause(self, paused: bool) -> None:
        """Stop (or resume) admitting waiting requests; running ones go on."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the executor died or its step loop hangs."""

    @abstractmethod
    async def close(self) -> None: ...
