"""An executor in another thread of this process: the same two ends as the transport between processes."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable

import msgspec

from stoker.runtime.client import Cancel, ExecutorInfo, Mailbox, Message, StatsQuery
from stoker.runtime.request import ExecutorStats, SequenceOutput
from stoker.runtime.transport.streams import NAME_CHARS, StreamingClient, new_name


class InProcessMailbox(Mailbox):
    """Takes messages from a thread-safe queue; gives outputs to each client's event loop, one call a step."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.last_poll_s = time.monotonic()
        self.closed_reason: str | None = None
        self._arrived: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._clients: dict[str, InProcessClient] = {}

    def poll(self, timeout_s: float) -> list[Message]:
        self.last_poll_s = time.monotonic()
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            if timeout_s > 0:
                messages.append(self._arrived.get(timeout=timeout_s))
            while True:
                messages.append(self._arrived.get_nowait())
        self.last_poll_s = time.monotonic()
        return messages

    def send(self, outputs: list[SequenceOutput]) -> None:
        for name, batch in split_by_client(outputs).items():
            if (client := self._clients.get(name)) is not None:
                # Copies: the client gives its own ids back to its outputs, and the executor keeps its objects.
                client.post(client._deliver, [msgspec.structs.replace(output) for output in batch])

    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        if (client := self._clients.get(query.client)) is not None:
            client.post(client._answer, query.number, stats)

    def close(self, reason: str = "the executor stopped") -> None:
        self.closed_reason = self.closed_reason or reason
        for client in list(self._clients.values()):
            client.post(client._fail, reason)

    def put(self, message: Message) -> None:
        self._arrived.put(message)

    def join(self, client: InProcessClient) -> None:
        self._clients[client.name] = client

    def leave(self, client: InProcessClient) -> None:
        self._clients.pop(client.name, None)


class InProcessClient(StreamingClient):
    """Bound to the event loop that runs when it is made.

    `alive` turns false when the executor's loop has not polled for `timeout_s`; None: the executor's step_timeout_s.
    """

    def __init__(self, mailbox: InProcessMailbox, *, timeout_s: float | None = None) -> None:
        super().__init__(mailbox.info, new_name())
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailbox
        self._timeout_s = mailbox.info.step_timeout_s if timeout_s is None else timeout_s
        mailbox.join(self)
        if mailbox.closed_reason is not None:
            self._fail(mailbox.closed_reason)

    def post(self, call: Callable, *args: object) -> None:
        """Run `call` in the client's event loop, from any thread. A loop that is closed has nobody left to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _transmit(self, message: Message) -> None:
        self._mailbox.put(message)

    @property
    def alive(self) -> bool:
        return self._failure is None and time.monotonic() - self._mailbox.last_poll_s < self._timeout_s

    async def close(self) -> None:
        for wire_id in self._streams:
            self._transmit(Cancel(wire_id))
        self._mailbox.leave(self)
        self._fail("this client was closed")


def split_by_client(outputs: list[SequenceOutput]) -> dict[str, list[SequenceOutput]]:
    """Outputs by the client's name, which every request id on the wire begins with."""
    batches: dict[str, list[SequenceOutput]] = {}
    for output in outputs:
        name = output.request_id[:NAME_CHARS]
        if (batch := batches.get(name)) is None:
            batches[name] = [output]
        else:
            batch.append(output)
    return batches
