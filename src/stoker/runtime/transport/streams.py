"""The half of a client that every transport shares: open requests, what arrived for each, and how they end."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator

import msgspec

from stoker.base.errors import RequestError, UnavailableError
from stoker.runtime.client import Cancel, ExecutorClient, ExecutorInfo, Message, Pause, Shutdown, StatsQuery, Submit
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest

NAME_CHARS = 12  # a client's name; every request id on the wire begins with it
STATS_TIMEOUT_S = 30.0


def new_name() -> str:
    return uuid.uuid4().hex[:NAME_CHARS]


class OutputStream:
    """Outputs of one request that nobody has taken yet."""

    def __init__(self, request: TokenRequest, wire_id: str) -> None:
        self.request_id = request.request_id
        self.wire_id = wire_id
        self.unfinished = request.params.n
        self._outputs: list[SequenceOutput] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Every sequence ended and its last output was taken."""
        return self.unfinished <= 0 and not self._outputs

    def put(self, output: SequenceOutput) -> None:
        self._outputs.append(output)
        self.unfinished -= output.finish_reason is not None
        self._notify()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._notify()

    async def take(self) -> list[SequenceOutput]:
        """Everything that arrived since the last call; waits for the first. Raises what `fail` was given."""
        if not self._outputs and self._error is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if not self._outputs and self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class StreamingClient(ExecutorClient):
    """An ExecutorClient over anything that carries messages there and calls `_deliver`, `_answer` and `_fail` back in the event loop."""

    def __init__(self, info: ExecutorInfo, name: str) -> None:
        self.info = info
        self.name = name
        self._streams: dict[str, OutputStream] = {}  # by the id on the wire
        self._wire_ids: dict[str, str] = {}  # by the request's own id
        self._num_requests = 0
        self._queries: dict[int, asyncio.Future[ExecutorStats]] = {}
        self._num_queries = 0
        self._failure: UnavailableError | None = None

    @abstractmethod
    def _transmit(self, message: Message) -> None:
        """Send soon, without waiting. May call `_fail`."""

    async def generate(self, request: TokenRequest) -> AsyncGenerator[list[SequenceOutput], None]:
        stream = self._open(request)
        try:
            while not stream.finished:
                yield await stream.take()
        finally:
            self._leave(stream)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        if (wire_id := self._wire_ids.get(request_id)) is not None:
            self._transmit(Cancel(wire_id, index))

    async def stats(self) -> ExecutorStats:
        self._require_executor()
        self._num_queries += 1
        query = StatsQuery(self.name, self._num_queries)
        self._queries[query.number] = answer = asyncio.get_running_loop().create_future()
        self._transmit(query)
        try:
            return await asyncio.wait_for(answer, STATS_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(
                f"The executor did not answer within {STATS_TIMEOUT_S:.0f} s.", cure="See its log; restart it."
            ) from None
        finally:
            self._queries.pop(query.number, None)

    def pause(self, paused: bool) -> None:
        self._transmit(Pause(paused))

    def shutdown(self, drain: bool = True) -> None:
        """Ask the executor's loop to end, after its present requests when draining."""
        self._transmit(Shutdown(drain))

    def _open(self, request: TokenRequest) -> OutputStream:
        self._require_executor()
        if request.request_id in self._wire_ids:
            raise RequestError("request_id", request.request_id, "a request with this id is in flight", cure="Use a new id.")
        # The count keeps late outputs of a cancelled request from a new one with the same id.
        self._num_requests += 1
        wire_id = f"{self.name}:{self._num_requests}:{request.request_id}"
        self._wire_ids[request.request_id] = wire_id
        stream = self._streams[wire_id] = OutputStream(request, wire_id)
        self._transmit(Submit(msgspec.structs.replace(request, request_id=wire_id)))
        return stream

    def _leave(self, stream: OutputStream) -> None:
        del self._streams[stream.wire_id], self._wire_ids[stream.request_id]
        if stream.unfinished > 0 and self._failure is None:
            self._transmit(Cancel(stream.wire_id))

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                output.request_id = stream.request_id
                stream.put(output)

    def _answer(self, number: int, stats: ExecutorStats) -> None:
        if (answer := self._queries.get(number)) is not None and not answer.done():
            answer.set_result(stats)

    def _fail(self, reason: str) -> None:
        """The executor is gone: end whatever waits for it."""
        if self._failure is not None:
            return
        self._failure = UnavailableError(f"The executor is gone: {reason}.", cure="See its log; restart it.")
        for stream in self._streams.values():
            stream.fail(self._failure)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(self._failure)

    def _require_executor(self) -> None:
        if self._failure is not None:
            raise self._failure
