"""The interface between frontends and an executor, in the same process or in different ones.

A frontend uses an `ExecutorClient` to submit token ids, receive outputs and cancel. The step loop of the executor uses a `Mailbox` to
receive messages and send outputs. Both are the same for every transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

import msgspec

from stoker.base.config import Limits
from stoker.base.errors import UnavailableError
from stoker.base.profile_query import ProfileQuery, ProfileResult
from stoker.runtime.kv.events.wire import EventAddress
from stoker.runtime.live_state import LiveQuery, LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest
from stoker.runtime.transfer.address import TransferAddress


class ExecutorInfo(msgspec.Struct, kw_only=True):
    """The properties of an executor that a frontend needs to check requests."""

    limits: Limits
    max_seq_len: int  # tokens of one sequence: the minimum of the engine's limit, the model's positions and the KV cache
    vocab_size: int
    device: str
    kv_cache_tokens: int  # of all data-parallel ranks together
    model: str  # architecture name
    memory: dict[str, int] = {}  # the memory budget of the leader's device: bytes by purpose
    speculate: str = "none"  # the draft proposer
    step_timeout_s: float = 120.0  # a loop that does not answer for this time counts as hung
    kv_events: EventAddress | None = None  # where events about KV cache blocks are published
    transfer: TransferAddress | None = None  # where other executors read KV cache blocks
    data_parallel: int = 1  # ranks with their own sequences; the limits are those of each


class Submit(msgspec.Struct, tag=True, array_like=True):
    """A new request. Its request_id is unique over all clients of the mailbox."""

    request: TokenRequest


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """End a request or one of its sequences. Unknown ids are ignored."""

    request_id: str
    index: int | None = None  # None: every sequence


class Pause(msgspec.Struct, tag=True, array_like=True):
    """Stop or resume admitting waiting requests."""

    paused: bool


class StatsQuery(msgspec.Struct, tag=True, array_like=True):
    """A request for ExecutorStats, which is answered with `Mailbox.reply_stats`."""

    client: str
    number: int  # identifies the query of the client


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End the loop: with `drain` after all present requests, else immediately."""

    drain: bool = True


Message = Submit | Cancel | Pause | StatsQuery | LiveQuery | ProfileQuery | Shutdown


class Mailbox(ABC):
    """The executor's end, for a synchronous loop in one thread.

    Request ids begin with the name of the client, so that ids of different frontends never collide; outputs have the same ids. When a
    client closes or disappears, `poll` returns a Cancel for each of its requests.
    """

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Message]:
        """Messages in order of arrival. Waits at most `timeout_s` seconds for the first one; 0 does not wait."""

    @abstractmethod
    def wake(self) -> None:
        """End the wait of `poll`, or else the next one, also without a message. May be called from any thread."""

    @abstractmethod
    def send(self, outputs: list[SequenceOutput]) -> None:
        """Send the outputs of a step, in one message per client. Outputs for clients that have left are dropped."""

    @abstractmethod
    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        """Send `stats` as the answer to `query`."""

    @abstractmethod
    def reply_live(self, query: LiveQuery, state: LiveState) -> None:
        """Send `state` as the answer to `query`."""

    @abstractmethod
    def reply_profile(self, query: ProfileQuery, result: ProfileResult) -> None:
        """Send `result` as the answer to `query`."""

    @abstractmethod
    def close(self, reason: str = "the executor stopped") -> None:
        """Close the connections. Pending requests of all clients end with UnavailableError. May be called repeatedly."""


class TokenLatencies(ABC):
    """Receives the times of tokens of all requests of a client. `count` requests had the same time."""

    @abstractmethod
    def add_first(self, seconds: float) -> None:
        """A request received its first tokens, this long after it was submitted."""

    @abstractmethod
    def add_next(self, seconds: float, count: int) -> None:
        """`count` requests received further tokens, this long after their previous ones."""


class ExecutorClient(ABC):
    """A frontend's end: submits requests, streams outputs, cancels. For concurrent requests of one event loop."""

    info: ExecutorInfo

    @abstractmethod
    def generate(self, request: TokenRequest) -> AsyncGenerator[list[SequenceOutput], None]:
        """Yield the outputs of the request's sequences, one list per wake-up, until each has a finish_reason.

        Closing the iterator early (break, cancellation, close) cancels the request within one step. Errors of the request are outputs
        with finish_reason ERROR. Raises UnavailableError if the executor has ended or hangs.
        """

    @abstractmethod
    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or its sequence `index`, with finish_reason CANCELLED. An unknown id is ignored."""

    @abstractmethod
    async def stats(self) -> ExecutorStats:
        """The executor's current statistics. Raises UnavailableError if it has ended or does not answer."""

    @abstractmethod
    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        """The executor's sequences, blocks, steps and log, as LiveQuery requests them. Raises UnavailableError."""

    @abstractmethod
    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        """Profile the next steps, as ProfileQuery requests it. Raises UnavailableError."""

    @abstractmethod
    def pause(self, paused: bool) -> None:
        """Stop (True) or resume (False) the admission of waiting requests. Running requests continue."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False if the executor has ended or its step loop hangs."""

    @abstractmethod
    async def recovery(self) -> None:
        """Return when the executor accepts requests, which may be after a restart. Raises UnavailableError if this client has ended."""

    @abstractmethod
    def end_requests(self, error: UnavailableError) -> None:
        """Cancel all requests, and end their iterators with `error`. Later requests are refused with it, too; `alive` becomes False."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel all requests and disconnect."""
