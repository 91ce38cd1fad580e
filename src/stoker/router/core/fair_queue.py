"""The queue of requests for which no replica has room: tenants, their adapters and their sessions take turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Generic, TypeVar

MAX_IDLE_FLOWS = 64  # flows without waiting requests whose service is remembered, per level

T = TypeVar("T")


class _Flow(Generic[T]):
    """One tenant, adapter or session: its waiting requests, or the flows into which they are divided."""

    __slots__ = ("flows", "items", "now", "num_waiting", "start")

    def __init__(self, start: int) -> None:
        self.start = start  # virtual time at which the next request of this flow begins
        self.now = 0  # virtual time of the flows inside
        self.num_waiting = 0  # requests in this flow and in those inside
        self.flows: dict[str, _Flow[T]] = {}
        self.items: dict[int, tuple[T, int]] = {}  # number → (request, cost), in order of arrival

    def next_flow(self) -> _Flow[T]:
        """The flow inside that is next: of those with waiting requests, the one with the least service."""
        return min((flow for flow in self.flows.values() if flow.num_waiting), key=lambda flow: flow.start)

    def charge(self, inner: _Flow[T], cost: int) -> None:
        """The flow `inner` receives service of this cost."""
        self.now = max(self.now, inner.start)
        inner.start = self.now + cost
        if len(self.flows) > MAX_IDLE_FLOWS:
            self.flows = {name: flow for name, flow in self.flows.items() if flow.num_waiting or flow.start > self.now}


class FairQueue(Generic[T]):
    """Start-time fair queueing over paths of names, such as (tenant, adapter, session); all paths have the same length.

    At each level of the path, the flow that has received the least service is next; service is measured by the costs of requests. A flow
    that was idle gains no credit. Requests of one flow are in order of arrival.
    """

    def __init__(self) -> None:
        self._root: _Flow[T] = _Flow(0)
        self._paths: dict[int, tuple[str, ...]] = {}  # number → path
        self._next = 0

    def __len__(self) -> int:
        return len(self._paths)

    def push(self, item: T, path: tuple[str, ...], cost: int) -> int:
        """Add a request with a cost of at least 1. Returns its number, for `discard`."""
        number, self._next = self._next, self._next + 1
        flow = self._root
        flow.num_waiting += 1
        for name in path:
            inner = flow.flows.get(name)
            if inner is None:
                inner = flow.flows[name] = _Flow(flow.now)
            elif not inner.num_waiting:
                inner.start = max(inner.start, flow.now)
            flow = inner
            flow.num_waiting += 1
        flow.items[number] = (item, max(1, cost))
        self._paths[number] = path
        return number

    def discard(self, number: int) -> None:
        """Remove a request, if it still waits."""
        if (path := self._paths.pop(number, None)) is None:
            return
        flow = self._root
        flow.num_waiting -= 1
        for name in path:
            flow = flow.flows[name]
            flow.num_waiting -= 1
        del flow.items[number]
        self._reset_if_empty()

    def pop(self) -> T:
        """Remove and return the next request. Raises IndexError if none waits."""
        if not self._paths:
            raise IndexError("no request waits")
        flows = [self._root]
        while not flows[-1].items:
            flows.append(flows[-1].next_flow())
        number = next(iter(flows[-1].items))
        item, cost = flows[-1].items.pop(number)
        del self._paths[number]
        for flow in flows:
            flow.num_waiting -= 1
        for outer, inner in pairwise(flows):
            outer.charge(inner, cost)
        self._reset_if_empty()
        return item

    def _reset_if_empty(self) -> None:
        """Forget the service of all flows if nothing waits."""
        if not self._paths:
            self._root = _Flow(0)
