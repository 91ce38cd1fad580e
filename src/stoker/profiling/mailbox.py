"""Token ids in bulk on the calling thread: submit requests, turn the executor, collect. What the benchmarks use."""

from __future__ import annotations

from collections import deque

from stoker.runtime.client import ExecutorInfo, Mailbox, Message, StatsQuery, Submit
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest


class SynchronousMailbox(Mailbox):
    """Both ends in one object, for one thread."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.messages: deque[Message] = deque()
        self.outputs: list[SequenceOutput] = []

    def poll(self, timeout_s: float) -> list[Message]:
        arrived = list(self.messages)
        self.messages.clear()
        return arrived

    def send(self, outputs: list[SequenceOutput]) -> None:
        self.outputs += outputs

    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        raise TypeError("ask the executor itself")

    def close(self, reason: str = "the executor stopped") -> None:
        return

    def submit(self, requests: list[TokenRequest]) -> None:
        self.messages += [Submit(request) for request in requests]

    def take(self) -> list[SequenceOutput]:
        """Outputs since the last call."""
        taken, self.outputs = self.outputs, []
        return taken
