"""The part of a client that is the same for every transport: open requests, their outputs, and their end."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from stoker.base.errors import RequestError, UnavailableError
from stoker.base.profile_query import WRITE_S, ProfileQuery, ProfileResult
from stoker.runtime.client import Cancel, ExecutorClient, ExecutorInfo, Message, Pause, Shutdown, StatsQuery, Submit, TokenLatencies
from stoker.runtime.live_state import LiveQuery, LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest

NAME_CHARS = 12  # length of the name of a client, with which every request id begins on the wire
STATS_TIMEOUT_S = 30.0


def new_name() -> str:
    """A random name for a client, of NAME_CHARS characters."""
    return uuid.uuid4().hex[:NAME_CHARS]


class OutputStream:
    """The outputs of one request that its consumer has not received yet."""

    def __init__(self, request: TokenRequest, wire_id: str) -> None:
        self.request_id = request.request_id
        self.wire_id = wire_id
        self.whole = request.whole
        self.unfinished = request.params.n
        self.last_s = time.monotonic()  # when its last tokens arrived; before the first ones, when it was submitted
        self.has_tokens = False
        self._outputs: list[SequenceOutput] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended and its last output was received."""
        return self.unfinished <= 0 and not self._outputs

    def put(self, output: SequenceOutput) -> None:
        """Add an output, and wake the consumer."""
        self._outputs.append(output)
        self.unfinished -= output.finish_reason is not None
        self._notify()

    def fail(self, error: Exception) -> None:
        """End the stream: `get` raises `error` after the outputs that were added before."""
        self._error = error
        self._notify()

    async def get(self) -> list[SequenceOutput]:
        """The outputs since the last call. Waits until there is at least one. Raises the error that was passed to `fail`."""
        if not self._outputs and self._error is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if not self._outputs and self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _notify(self) -> None:
        """Wake a consumer that waits in `get`."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class StreamingClient(ExecutorClient):
    """An ExecutorClient without a transport. A subclass sends messages, and calls `_deliver`, `_answer` and `_fail` in the event loop."""

    def __init__(self, info: ExecutorInfo, name: str) -> None:
        self.info = info
        self.name = name
        self._streams: dict[str, OutputStream] = {}  # by the id on the wire
        self._wire_ids: dict[str, str] = {}  # by the request's own id
        self._num_requests = 0
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._num_queries = 0
        self._failure: UnavailableError | None = None  # why requests are refused; None: they are accepted
        self._ended = False  # `_failure` is final
        self.latencies: TokenLatencies | None = None  # None: latencies are not measured
        self._changed = asyncio.Event()  # set when `_failure` or `_ended` changes

    @abstractmethod
    def _transmit(self, message: Message) -> None:
        """Queue a message to the executor without waiting. May call `_fail`."""

    async def generate(self, request: TokenRequest) -> AsyncGenerator[list[SequenceOutput], None]:
        """Submit the request and yield its outputs as they arrive. Closing the generator early cancels the request."""
        stream = self._open(request)
        try:
            while not stream.finished:
                yield await stream.get()
        finally:
            self._close_stream(stream)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        if (wire_id := self._wire_ids.get(request_id)) is not None:
            self._transmit(Cancel(wire_id, index))

    async def stats(self) -> ExecutorStats:
        stats: ExecutorStats = await self._query(lambda number: StatsQuery(self.name, number))
        return stats

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        state: LiveState = await self._query(lambda number: LiveQuery(self.name, number, detail, first_step, log_after_s))
        return state

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        result: ProfileResult = await self._query(
            lambda number: ProfileQuery(self.name, number, num_steps, time_s), time_s + WRITE_S + STATS_TIMEOUT_S
        )
        return result

    async def _query(self, make_query: Callable[[int], StatsQuery | LiveQuery | ProfileQuery], timeout_s: float = STATS_TIMEOUT_S) -> Any:
        """The answer to the query that `make_query` returns for its number. Raises UnavailableError if none arrives in time."""
        self._require_executor()
        self._num_queries += 1
        query = make_query(self._num_queries)
        self._queries[query.number] = answer = asyncio.get_running_loop().create_future()
        self._transmit(query)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise UnavailableError(f"The executor did not answer within {timeout_s:.0f} s.", cure="See its log; restart it.") from None
        finally:
            self._queries.pop(query.number, None)

    def pause(self, paused: bool) -> None:
        self._transmit(Pause(paused))

    def shutdown(self, drain: bool = True) -> None:
        """End the step loop of the executor: with `drain` after all present requests, else immediately."""
        self._transmit(Shutdown(drain))

    def _open(self, request: TokenRequest) -> OutputStream:
        """Submit a request under an id that is unique among all clients. Raises RequestError for an id in flight, or UnavailableError."""
        self._require_executor()
        if request.request_id in self._wire_ids:
            raise RequestError("request_id", request.request_id, "a request with this id is in flight", cure="Use a new id.")
        # The number separates late outputs of a cancelled request from those of a new request with the same id.
        self._num_requests += 1
        wire_id = f"{self.name}:{self._num_requests}:{request.request_id}"
        self._wire_ids[request.request_id] = wire_id
        stream = self._streams[wire_id] = OutputStream(request, wire_id)
        self._transmit(Submit(msgspec.structs.replace(request, request_id=wire_id)))
        return stream

    def _close_stream(self, stream: OutputStream) -> None:
        """Forget a request, and cancel it if it has not ended."""
        del self._streams[stream.wire_id], self._wire_ids[stream.request_id]
        if stream.unfinished > 0 and self._failure is None:  # `_fail` has cancelled it otherwise
            self._transmit(Cancel(stream.wire_id))

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """Pass outputs from the executor to the streams of their requests."""
        if self.latencies is not None:
            self._measure(outputs, self.latencies)
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                output.request_id = stream.request_id
                stream.put(output)

    def _measure(self, outputs: list[SequenceOutput], latencies: TokenLatencies) -> None:
        """Report the times of tokens that arrived together. Most requests have the same time, because they are in the same steps."""
        now, streams, last_s, count = time.monotonic(), self._streams, 0.0, 0
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None or stream.last_s == now or not output.token_ids:
                continue
            if not stream.has_tokens:
                stream.has_tokens = True
                latencies.add_first(now - stream.last_s)
            elif stream.last_s == last_s:
                count += 1
            else:
                if count:
                    latencies.add_next(now - last_s, count)
                last_s, count = stream.last_s, 1
            stream.last_s = now
        if count:
            latencies.add_next(now - last_s, count)

    def _answer(self, number: int, result: ExecutorStats | LiveState | ProfileResult) -> None:
        """Pass the answer to the query with this number to its caller."""
        if (answer := self._queries.get(number)) is not None and not answer.done():
            answer.set_result(result)

    async def recovery(self) -> None:
        while self._failure is not None:
            if self._ended:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()

    def end_requests(self, error: UnavailableError) -> None:
        self._ended = True
        self._refuse_with(error)

    def _fail(self, reason: str) -> None:
        """End all requests and queries with UnavailableError, because the executor has ended, hangs, or is not connected."""
        if self._failure is None:
            self._refuse_with(UnavailableError(f"The executor is unavailable: {reason}.", cure="See its log, or retry."))

    def _refuse_with(self, error: UnavailableError) -> None:
        """End all requests and queries with `error`, and refuse new ones. An executor that continues to run cancels the sequences."""
        self._failure = error
        self._changed.set()
        for wire_id, stream in self._streams.items():
            if stream.unfinished > 0:
                self._transmit(Cancel(wire_id))
            stream.fail(self._failure)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(self._failure)

    def _require_executor(self) -> None:
        """Raise UnavailableError if the executor has ended or is not connected, or `end_requests` was called."""
        if self._failure is not None:
            raise self._failure
