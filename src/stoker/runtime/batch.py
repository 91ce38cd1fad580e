"""Token ids in bulk, without an event loop: submit many requests, collect all outputs. What `LLM.generate` and the benchmarks use."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from stoker.base.errors import UnavailableError
from stoker.runtime.client import ExecutorInfo, Mailbox, Message, StatsQuery
from stoker.runtime.request import ExecutorStats, SequenceOutput


class BulkMailbox(Mailbox):
    """Both ends in one object: the executor's thread polls and sends, another thread submits and drains."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[list[SequenceOutput] | ExecutorStats | str] = queue.SimpleQueue()

    def poll(self, timeout_s: float) -> list[Message]:
        messages: list[Message] = []
        try:
            if timeout_s > 0:
                messages.append(self._messages.get(timeout=timeout_s))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages

    def send(self, outputs: list[SequenceOutput]) -> None:
        self._outputs.put(outputs)

    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        self._outputs.put(stats)

    def close(self, reason: str = "the executor stopped") -> None:
        self._outputs.put(reason)

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def outputs(self) -> Iterator[SequenceOutput]:
        """Outputs as they come. Raises UnavailableError when the executor ends."""
        while True:
            item = self._outputs.get()
            if isinstance(item, str):
                raise UnavailableError(f"The executor is gone: {item}.", cure="See its log; make a new LLM.")
            if isinstance(item, list):
                yield from item
