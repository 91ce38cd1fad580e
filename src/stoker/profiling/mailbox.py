"""A mailbox for one thread, which submits requests, runs the step loop and collects outputs: for benchmarks and tests."""

from __future__ import annotations

from collections import deque

from stoker.base.profile_query import ProfileQuery, ProfileResult
from stoker.runtime.client import ExecutorInfo, Mailbox, Message, StatsQuery, Submit
from stoker.runtime.live_state import LiveQuery, LiveState
from stoker.runtime.request import ExecutorStats, SequenceOutput, TokenRequest


class SynchronousMailbox(Mailbox):
    """Both ends of the connection to an executor, used by a single thread."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.messages: deque[Message] = deque()
        self.outputs: list[SequenceOutput] = []

    def poll(self, timeout_s: float) -> list[Message]:
        """The messages since the last call. Never waits."""
        messages = list(self.messages)
        self.messages.clear()
        return messages

    def wake(self) -> None:
        """Does nothing, because `poll` never waits."""

    def send(self, outputs: list[SequenceOutput]) -> None:
        """Collect outputs for `pop_outputs`."""
        self.outputs += outputs

    def reply_stats(self, query: StatsQuery, stats: ExecutorStats) -> None:
        """Not supported: raises TypeError. Use `Executor.snapshot`."""
        raise TypeError("call Executor.snapshot instead")

    def reply_live(self, query: LiveQuery, state: LiveState) -> None:
        """Not supported: raises TypeError."""
        raise TypeError("the mailbox of benchmarks has no queries")

    def reply_profile(self, query: ProfileQuery, result: ProfileResult) -> None:
        """Not supported: raises TypeError."""
        raise TypeError("the mailbox of benchmarks has no queries")

    def close(self, reason: str = "the executor stopped") -> None:
        """Does nothing."""
        return

    def submit(self, requests: list[TokenRequest]) -> None:
        """Add requests as messages for the next `poll`."""
        self.messages += [Submit(request) for request in requests]

    def pop_outputs(self) -> list[SequenceOutput]:
        """The outputs since the last call, which are removed."""
        outputs, self.outputs = self.outputs, []
        return outputs
