"""The event loop of the simulator: arrivals, and ends of steps, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.router.core.policy import Decision, Route
from stoker.router.core.prefix import token_prefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Lease, Router
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.transfer.address import TransferAddress
from stoker.simulation.replica import ReplicaSettings, SimulatedReplica
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import Arrival
from stoker.simulation.transfers import SimulatedTransfer, TransferLinks, TransferSettings

Follow = Callable[[Arrival, Sequence, float], Arrival | None]  # the request that follows an ended one, with the time of the end


class Results(msgspec.Struct):
    """What the requests of a simulation experienced. Times are in seconds."""

    first_token_s: array[float]
    between_tokens_s: array[float]
    duration_s: array[float]
    transfer_s: array[float]  # from the end of a prompt to the arrival of its last block on another replica
    num_rejected: int = 0  # that exceed the KV cache of a replica
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_transferred_tokens: int = 0  # between replicas
    end_s: float = 0.0


class _Running:
    """A request that a replica computes."""

    __slots__ = ("arrival", "last_s", "lease", "num_cached")

    def __init__(self, arrival: Arrival, lease: Lease) -> None:
        self.arrival, self.lease = arrival, lease
        self.last_s: float | None = None  # when its last token was committed
        self.num_cached: int | None = None  # tokens that no replica has computed, of a prompt that was transferred


class Simulator:
    """`num_replicas` equal replicas behind one router, and `num_prefill` further ones that compute prompts for them."""

    def __init__(
        self,
        num_replicas: int,
        replica: ReplicaSettings,
        step_times: StepTimes,
        routing: RoutingSettings = RoutingSettings(),
        num_prefill: int = 0,
        transfers: TransferSettings = TransferSettings(),
    ) -> None:
        self.now_s = 0.0
        self.results = Results(array("d"), array("d"), array("d"), array("d"))
        # The schedulers of the replicas hold the waiting requests.
        self.router = Router(msgspec.structs.replace(routing, max_in_flight=1 << 20), lambda: self.now_s)
        self._settings = replica
        self._replicas: dict[str, SimulatedReplica] = {}
        for i in range(num_replicas + num_prefill):
            added = self.router.fleet.add(f"replica-{i}")
            added.publishes_events = True
            if num_prefill:
                self.router.fleet.set_transfer(added, TransferAddress("decode" if i < num_replicas else "prefill", added.name, 1))
            self.router.fleet.set_health(added, ReplicaState.READY, 0.0)
            self._replicas[added.name] = SimulatedReplica(self.router.fleet, added, replica, step_times)
        self._links = TransferLinks(transfers)
        self._running: dict[int, _Running] = {}  # by seq_id
        self._events: list[tuple[float, int, SimulatedReplica | Arrival | SimulatedTransfer]] = []
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
            elif isinstance(event, SimulatedTransfer):
                self._end_transfer(event)
            else:
                self._arrive(event)
                if event is self._scheduled:
                    self._schedule_next(waiting)
        self.results.end_s = self.now_s
        return self.results

    def _schedule_next(self, waiting: Iterator[Arrival]) -> None:
        """Schedule the next arrival of the trace. One at a time, so that a long trace is not read into memory."""
        if (arrival := next(waiting, None)) is not None:
            self._scheduled = arrival
            self._push(max(arrival.at_s, self.now_s), arrival)

    def _push(self, at_s: float, event: SimulatedReplica | Arrival | SimulatedTransfer) -> None:
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
        running = self._running[seq.seq_id] = _Running(arrival, self.router.begin(route, decision))
        self.results.num_prompt_tokens += seq.num_prompt
        prefill = self.router.choose_prefill(route, decision)
        if prefill is None:
            replica.add(seq)
            self._start_step(replica)
        else:
            running.lease.start_decode()
            self._compute_elsewhere(route, prefill, seq, replica)

    def _compute_elsewhere(self, route: Route, decision: Decision, seq: Sequence, target: SimulatedReplica) -> None:
        """Let another replica compute the prompt of a sequence."""
        request = msgspec.structs.replace(seq.request, params=SamplingParams(max_tokens=1, seed=0))
        prompt = Sequence(next(self._numbers), request, 0, self.now_s)
        num_cached = len(target.scheduler.kv_cache.cached_prefix(seq.prefix_root, seq.tokens)) * self._settings.tokens_per_block
        self._links.add(SimulatedTransfer(prompt, seq, target, self.router.begin(route, decision), num_cached))
        computing = self._replicas[decision.replica.name]
        computing.add(prompt)
        self._start_step(computing)

    def _end_transfer(self, transfer: SimulatedTransfer) -> None:
        """All blocks of a prompt have arrived."""
        self.results.transfer_s.append(self.now_s - transfer.computed_s)
        self.results.num_transferred_tokens += transfer.num_tokens
        self._running[transfer.seq.seq_id].num_cached = max(transfer.num_cached, transfer.prompt.num_cached)
        transfer.target.add_imported(transfer.seq)
        self._start_step(transfer.target)

    def _start_step(self, replica: SimulatedReplica) -> None:
        """Start a step of an idle replica, if there is something to compute."""
        if not replica.is_running and (end_s := replica.start_step(self.now_s)) is not None:
            self._push(end_s, replica)

    def _end_step(self, replica: SimulatedReplica, follow: Follow | None) -> None:
        """Measure the tokens of a step, and start the next one."""
        results, now = self.results, self.now_s
        results.num_steps += 1
        plan, outcome = replica.end_step()
        for at_s, transfer in self._links.end_step(replica, plan, now):
            transfer.lease.succeed()
            self._push(at_s, transfer)
        for seq in outcome.sequences:
            if (running := self._running.get(seq.seq_id)) is None:
                continue  # a prompt for another replica
            if running.last_s is None:
                results.first_token_s.append(now - seq.arrival)
                results.num_reused_tokens += seq.num_cached if running.num_cached is None else running.num_cached
                running.lease.start_decode()
            else:
                results.between_tokens_s.append(now - running.last_s)
            running.last_s = now
            results.num_output_tokens += 1
        for seq in outcome.finished:
            if (running := self._running.pop(seq.seq_id, None)) is None:
                continue
            running.lease.succeed()
            results.duration_s.append(now - seq.arrival)
            if follow is not None and (following := follow(running.arrival, seq, now)) is not None:
                self._push(following.at_s, following)
        self._start_step(replica)
