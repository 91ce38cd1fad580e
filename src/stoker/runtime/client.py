"""The one way to reach an executor, in this process or another, and the executor's end of it.

A frontend holds an `ExecutorClient`: submit token ids, receive outputs, cancel. The executor's loop holds a `Mailbox`: take what
arrived, send what a step made. Neither can tell which transport joins them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

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
    step_timeout_s: float = 120.0  # a loop that is silent for so long hangs


class Submit(msgspec.Struct, tag=True, array_like=True):
    """A new request. Its request_id is unique over all clients of the mailbox."""

    request: TokenRequest


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """The client gave up on a request, or on one of its sequences. Unknown ids are to be ignored."""

    request_id: str
    index: int | None = None  # None: every sequence


class Pause(msgspec.Struct, tag=True, array_like=True):
    """Stop (or resume) admitting waiting requests."""

    paused: bool


class StatsQuery(msgspec.Struct, tag=True, array_like=True):
    """Answer with `Mailbox.reply_stats`."""

    client: str
    number: int  # the client's count of its queries


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End the loop: after the requests it has when draining, else at once."""

    drain: bool = True


Message = Submit | Cancel | Pause | StatsQuery | Shutdown


class Mailbox(ABC):
    """The executor's end: used from one plain synchronous loop, never from two threads.

    Request ids seen here carry the client's name, so that ids of two frontends never collide; outputs go back with the same ids.
    A client that closes or disappears is turned into a Cancel for each of its requests.
    """

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Message]:
        """What arrived, in order; waits up to `timeout_s` for the first message. 0 never waits."""

    @abstractmethod
    def send(self, outputs: list[SequenceOutput]) -> None:
        """A step's outputs, delivered in one message to each client concerned. Outputs of clients that left are dropped."""

    @abstractmethod
    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None: ...

    @abstractmethod
    def close(self, reason: str = "the executor stopped") -> None:
        """Tell every client; their pending requests end with UnavailableError. Idempotent."""


class ExecutorClient(ABC):
    """Submit, stream, cancel. Safe for many concurrent requests of one event loop."""

    info: ExecutorInfo

    @abstractmethod
    def generate(self, request: TokenRequest) -> AsyncGenerator[list[SequenceOutput], None]:
        """Outputs of the request's sequences, a list a wake-up, until each has a finish_reason.

        Leaving the iterator early (break, cancellation, close) cancels the request within one step. Errors of the
        request come as outputs with finish_reason ERROR; UnavailableError is raised when the executor is gone.
        """

    @abstractmethod
    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or its sequence `index`, with finish_reason CANCELLED. An unknown id is ignored."""

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
