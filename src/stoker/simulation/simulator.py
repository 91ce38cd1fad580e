"""The event loop of the simulator: arrivals, and ends of steps, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.router.core.policy import Route
from stoker.router.core.prefix import token_prefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Lease, Router
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.request import Sequence, TokenRequest
from stoker.simulation.replica import ReplicaSettings, SimulatedReplica
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import Arrival

Follow = Callable[[Arrival, Sequence, float], Arrival | None]  # the request that follows an ended one, with the time of the end


class Results(msgspec.Struct):
    """What the requests of a simulation experienced. Times are in seconds."""

    first_token_s: array[float]
    between_tokens_s: array[float]
    duration_s: array[float]
    num_rejected: int = 0  # that exceed the KV cache of a replica
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    end_s: float = 0.0


class _Running:
    """A request that a replica computes."""

    __slots__ = ("arrival", "last_s", "lease")

    def __init__(self, arrival: Arrival, lease: Lease) -> None:
        self.arrival, self.lease = arrival, lease
        self.last_s: float | None = None  # when its last token was committed


class Simulator:
    """`num_replicas` equal replicas behind one router."""

    def __init__(
        self, num_replicas: int, replica: ReplicaSettings, step_times: StepTimes, routing: RoutingSettings = RoutingSettings()
    ) -> None:
        self.now_s = 0.0
        self.results = Results(array("d"), array("d"), array("d"))
        # The schedulers of the replicas hold the waiting requests.
        self.router = Router(msgspec.structs.replace(routing, max_in_flight=1 << 20), lambda: self.now_s)
        self._settings = replica
        self._replicas: dict[str, SimulatedReplica] = {}
        for i in range(num_replicas):
            added = self.router.fleet.add(f"replica-{i}")
            added.publishes_events = True
            self.router.fleet.set_health(added, ReplicaState.READY, 0.0)
            self._replicas[added.name] = SimulatedReplica(self.router.fleet, added, replica, step_times)
        self._running: dict[int, _Running] = {}  # by seq_id
        self._events: list[tuple[float, int, SimulatedReplica | Arrival]] = []
        self._numbers = itertools.count()
        self._scheduled: Arrival | None = None  # the newest arrival of the trace

    def run(self, arrivals: Iterable[Arrival], follow: Follow | None = None) -> Results:
        """Simulate requests, which are in the order of their times, until all have ended. `follow` adds requests at the end of others."""
        waiting = iter(arrivals)
        self._schedule_next(waiting)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, SimulatedReplica):
                self._end_step(event, follow)
            else:
                self._arrive(event)
                if event is self._scheduled:
                    self._schedule_next(waiting)
        self.results.end_s = self.now_s
        self.results.num_reused_tokens = sum(each.scheduler.num_reused_tokens for each in self._replicas.values())
        return self.results

    def _schedule_next(self, waiting: Iterator[Arrival]) -> None:
        """Schedule the next arrival of the trace. One at a time, so that a long trace is not read into memory."""
        if (arrival := next(waiting, None)) is not None:
            self._scheduled = arrival
            self._push(max(arrival.at_s, self.now_s), arrival)

    def _push(self, at_s: float, event: SimulatedReplica | Arrival) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _arrive(self, arrival: Arrival) -> None:
        """Send a request to the replica that the router chooses."""
        request = TokenRequest(
            request_id=str(next(self._numbers)),
            prompt_ids=arrival.prompt_ids,
            params=SamplingParams(max_tokens=arrival.max_tokens, seed=0),
        )
        prefix = token_prefix(arrival.prompt_ids, self._settings.tokens_per_block)
        route = Route(prefix=prefix, session=arrival.session)
        decision = self.router.choose(route)
        assert decision is not None  # no replica is ever full
        replica = self._replicas[decision.replica.name]
        try:
            replica.scheduler.check(request)
        except RequestError:
            self.results.num_rejected += 1
            return
        seq = Sequence(next(self._numbers), request, 0, self.now_s)
        self._running[seq.seq_id] = _Running(arrival, self.router.begin(route, decision))
        self.results.num_prompt_tokens += seq.num_prompt
        replica.add(seq)
        self._start_step(replica)

    def _start_step(self, replica: SimulatedReplica) -> None:
        """Start a step of an idle replica, if there is something to compute."""
        if not replica.is_running and (end_s := replica.start_step(self.now_s)) is not None:
            self._push(end_s, replica)

    def _end_step(self, replica: SimulatedReplica, follow: Follow | None) -> None:
        """Measure the tokens of a step, and start the next one."""
        results, now = self.results, self.now_s
        results.num_steps += 1
        outcome = replica.end_step()
        for seq in outcome.sequences:
            running = self._running[seq.seq_id]
            if running.last_s is None:
                results.first_token_s.append(now - seq.arrival)
                running.lease.start_decode()
            else:
                results.between_tokens_s.append(now - running.last_s)
            running.last_s = now
            results.num_output_tokens += 1
        for seq in outcome.finished:
            running = self._running.pop(seq.seq_id)
            running.lease.succeed()
            results.duration_s.append(now - seq.arrival)
            if follow is not None and (following := follow(running.arrival, seq, now)) is not None:
                self._push(following.at_s, following)
        self._start_step(replica)
