"""The transport to an executor in another thread of the same process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable

import msgspec

from stoker.base.profile_query import ProfileQuery, ProfileResult
from stoker.runtime.client import ExecutorInfo, Mailbox, Message, StatsQuery
from stoker.runtime.live_state import LiveQuery, LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput
from stoker.runtime.transport.streams import NAME_CHARS, StreamingClient, new_name

WHOLE_DELAY_S = 0.02  # for which outputs of requests that are not streamed are collected


class InProcessMailbox(Mailbox):
    """Receives messages through a thread-safe queue. Outputs are posted to the event loop of each client, at most once per step."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.last_poll_s = time.monotonic()
        self.closed_reason: str | None = None
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: a call of `wake`
        self._clients: dict[str, InProcessClient] = {}

    def poll(self, timeout_s: float) -> list[Message]:
        self.last_poll_s = time.monotonic()
        messages: list[Message | None] = []
        with contextlib.suppress(queue.Empty):
            if timeout_s > 0:
                messages.append(self._queue.get(timeout=timeout_s))
            while True:
                messages.append(self._queue.get_nowait())
        self.last_poll_s = time.monotonic()
        return [message for message in messages if message is not None]

    def wake(self) -> None:
        self._queue.put(None)

    def send(self, outputs: list[SequenceOutput]) -> None:
        """Post the outputs to the event loops of their clients. Those of unknown clients are dropped."""
        for name, batch in split_by_client(outputs).items():
            if (client := self._clients.get(name)) is not None:
                # Copies, because the client changes the request ids of its outputs.
                client.post([msgspec.structs.replace(output) for output in batch])

    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        if (client := self._clients.get(query.client)) is not None:
            client.call_soon(client._answer, query.number, stats)

    def reply_live(self, query: LiveQuery, state: LiveState) -> None:
        if (client := self._clients.get(query.client)) is not None:
            client.call_soon(client._answer, query.number, state)

    def reply_profile(self, query: ProfileQuery, result: ProfileResult) -> None:
        if (client := self._clients.get(query.client)) is not None:
            client.call_soon(client._answer, query.number, result)

    def close(self, reason: str = "the executor stopped") -> None:
        self.closed_reason = self.closed_reason or reason
        for client in list(self._clients.values()):
            client.call_soon(client._receive)
            client.call_soon(client._fail, reason)

    def put(self, message: Message) -> None:
        """Add a message for the step loop. May be called from any thread."""
        self._queue.put(message)

    def connect(self, client: InProcessClient) -> None:
        """Send outputs for this client to its event loop from now on."""
        self._clients[client.name] = client

    def disconnect(self, client: InProcessClient) -> None:
        """Drop outputs for this client from now on."""
        self._clients.pop(client.name, None)


class InProcessClient(StreamingClient):
    """A client for the event loop in which it is created.

    `alive` is False if the step loop has not polled for `timeout_s` seconds, by default the step_timeout_s of the executor.

    The event loop and the step loop share Python's lock and the cores. Waking the event loop for each token took 5 % of a decode step of
    SmolLM2-135M. Outputs of requests that are not streamed (`TokenRequest.whole`) therefore wait up to WHOLE_DELAY_S for each other.
    """

    def __init__(self, mailbox: InProcessMailbox, *, timeout_s: float | None = None) -> None:
        super().__init__(mailbox.info, new_name())
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox
        self._timeout_s = mailbox.info.step_timeout_s if timeout_s is None else timeout_s
        self._posted: deque[SequenceOutput] = deque()
        self._posted_s = 0.0  # when the event loop was last woken for them
        mailbox.connect(self)
        if mailbox.closed_reason is not None:
            self._fail(mailbox.closed_reason)

    def post(self, outputs: list[SequenceOutput]) -> None:
        """Pass outputs to the event loop, from the thread of the step loop. Some may stay until the next call."""
        self._posted.extend(outputs)
        now = time.monotonic()
        if now - self._posted_s >= WHOLE_DELAY_S or not all(map(self._may_wait, outputs)):
            self._posted_s = now
            self.call_soon(self._receive)

    def _may_wait(self, output: SequenceOutput) -> bool:
        """Whether an output is neither the first nor the last of its sequence, and its consumer waits for the last one."""
        stream = self._streams.get(output.request_id)
        return stream is not None and stream.whole and output.admission is None and output.finish_reason is None

    def _receive(self) -> None:
        """Deliver the outputs that were posted."""
        outputs: list[SequenceOutput] = []
        while self._posted:
            outputs.append(self._posted.popleft())
        self._deliver(outputs)

    def call_soon(self, call: Callable[..., None], *args: object) -> None:
        """Schedule `call` in the event loop of the client, from any thread. Without effect if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _transmit(self, message: Message) -> None:
        self._mailbox.put(message)

    @property
    def alive(self) -> bool:
        """Whether the executor has polled its mailbox within the timeout, and has not closed it."""
        return self._failure is None and time.monotonic() - self._mailbox.last_poll_s < self._timeout_s

    async def recovery(self) -> None:
        self._require_executor()  # an executor that has ended is not started again

    async def close(self) -> None:
        self._fail("this client was closed")
        self._mailbox.disconnect(self)


def split_by_client(outputs: list[SequenceOutput]) -> dict[str, list[SequenceOutput]]:
    """Group outputs by client. A request id begins with the name of its client."""
    batches: dict[str, list[SequenceOutput]] = {}
    for output in outputs:
        name = output.request_id[:NAME_CHARS]
        if (batch := batches.get(name)) is None:
            batches[name] = [output]
        else:
            batch.append(output)
    return batches
