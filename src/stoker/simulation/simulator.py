"""The event loop of the simulator: arrivals, and ends of steps, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import msgspec

from stoker.base.errors import RequestError
from stoker.base.types import SamplingParams
from stoker.router.core.policy import Decision, Route
from stoker.router.core.prefix import hash_prefix
from stoker.router.core.replica import ReplicaState
from stoker.router.core.router import Lease, Router
from stoker.router.core.settings import RoutingSettings
from stoker.runtime.kv.events.wire import hashes_of_digests
from stoker.runtime.kv.prefix_index import block_digests, pack_blocks
from stoker.runtime.request import Sequence, TokenRequest
from stoker.runtime.transfer.address import TransferAddress
from stoker.simulation.frontend import Frontend, FrontendTimes
from stoker.simulation.latencies import Latencies
from stoker.simulation.replica import ReplicaSettings, SimulatedReplica
from stoker.simulation.running_steps import RunningSteps
from stoker.simulation.step_times import StepTimes
from stoker.simulation.traces import Arrival, PromptBlocks
from stoker.simulation.transfers import SimulatedTransfer, TransferLinks, TransferSettings

MIN_GAP_S = 1e-6  # between the tokens of a step and those of the next one, which has ended when the host has launched it

Follow = Callable[[Arrival, Sequence, float], Arrival | None]  # the request that follows an ended one, with the time of the end


class Results(msgspec.Struct):
    """What the requests of a simulation experienced. Times are in seconds; the first three series have the order in which requests end."""

    first_token_s: array[float]
    token_s: array[float]  # mean time between the tokens of a request; 0 if it has one
    duration_s: array[float]
    transfer_s: array[float]  # from the end of a prompt to the arrival of its last block on another replica
    between_tokens_s: Latencies
    num_rejected: int = 0  # that exceed the KV cache of a replica
    longest_rejected: int = 0  # tokens of the prompt and the answer
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    num_transferred_tokens: int = 0  # between replicas
    end_s: float = 0.0

    def merge(self, other: Results) -> None:
        """Add the requests of another part of the fleet."""
        for name in ("first_token_s", "token_s", "duration_s", "transfer_s"):
            getattr(self, name).extend(getattr(other, name))
        self.between_tokens_s.merge(other.between_tokens_s)
        for name in (name for name in self.__struct_fields__ if name.startswith("num_")):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest_rejected = max(self.longest_rejected, other.longest_rejected)
        self.end_s = max(self.end_s, other.end_s)


class _Running:
    """A request that a replica computes."""

    __slots__ = ("arrival", "arrived_s", "first_token_s", "lease", "num_cached")

    def __init__(self, arrival: Arrival, arrived_s: float, lease: Lease) -> None:
        self.arrival, self.arrived_s, self.lease = arrival, arrived_s, lease
        self.first_token_s = 0.0  # from its arrival
        self.num_cached: int | None = None  # tokens that no replica has computed, of a prompt that was transferred


class _Submission(NamedTuple):
    """A request on the way from the client to the executor of the chosen replica."""

    request: TokenRequest
    running: _Running
    route: Route
    decision: Decision
    blocks: PromptBlocks


_Event = SimulatedReplica | Arrival | SimulatedTransfer | _Submission


class Simulator:
    """`num_replicas` equal replicas behind one router, and `num_prefill` further ones that compute prompts for them.

    Without `prefix_reuse`, no block is indexed. For prompts of which no two have the same first block, the results are the same.
    Without `index_answers`, blocks of answers are not: the results are the same for different prompts that contain no answers. Nor are
    blocks of prompts that are not in `Arrival.blocks`: the results are the same if no other prompt has them.
    """

    def __init__(
        self,
        num_replicas: int,
        replica: ReplicaSettings,
        step_times: StepTimes,
        routing: RoutingSettings = RoutingSettings(),
        num_prefill: int = 0,
        transfers: TransferSettings = TransferSettings(),
        prefix_reuse: bool = True,
        index_answers: bool = True,
        frontend: FrontendTimes = FrontendTimes(),
    ) -> None:
        self.now_s = 0.0
        self.results = Results(array("d"), array("d"), array("d"), array("d"), Latencies())
        # The schedulers of the replicas hold the waiting requests.
        self.router = Router(msgspec.structs.replace(routing, max_in_flight=1 << 20), lambda: self.now_s)
        self._settings, self._prefix_reuse = replica, prefix_reuse
        self._replicas: dict[str, SimulatedReplica] = {}
        for i in range(num_replicas + num_prefill):
            added = self.router.fleet.add(f"replica-{i}")
            added.publishes_events = True
            if num_prefill:
                self.router.fleet.set_transfer(added, TransferAddress("decode" if i < num_replicas else "prefill", added.name, 1))
            self.router.fleet.set_health(added, ReplicaState.READY, 0.0)
            self._replicas[added.name] = SimulatedReplica(
                self.router.fleet, added, replica, step_times, prefix_reuse, bool(num_prefill), index_answers
            )
        no_time = frontend == FrontendTimes()
        self._frontends = None if no_time else {name: Frontend(frontend) for name in self._replicas}  # by the name of the replica
        self._links = TransferLinks(transfers) if num_prefill else None
        self._running: dict[int, _Running] = {}  # by seq_id
        self._events: list[tuple[float, int, _Event]] = []
        self._numbers = itertools.count()

    def run(self, arrivals: Iterable[Arrival], follow: Follow | None = None) -> Results:
        """Simulate requests, which are in the order of their times, until all have ended. `follow` adds requests at the end of others."""
        self.add_all(arrivals, follow)
        return self.finish(follow)

    def add_all(self, arrivals: Iterable[Arrival], follow: Follow | None = None) -> None:
        """Simulate up to the time of the last of these requests, none of which is before an earlier one."""
        for arrival in arrivals:
            self._advance(arrival.at_s, follow)
            self.now_s = max(arrival.at_s, self.now_s)
            self._arrive(arrival)

    def finish(self, follow: Follow | None = None) -> Results:
        """Simulate until all requests have ended."""
        self._advance(math.inf, follow)
        self.results.end_s = self.now_s
        return self.results

    def _advance(self, until_s: float, follow: Follow | None) -> None:
        """Handle the events up to this time, in the order of their times."""
        events = self._events
        while events and events[0][0] <= until_s:
            at_s, _, event = heapq.heappop(events)
            if isinstance(event, SimulatedReplica):
                if at_s == event.end_s:  # otherwise its steps were stopped earlier
                    self.now_s = at_s
                    self._end_steps(event, follow)
                elif at_s == event.report_s:
                    event.report()
                    if event.report_s != math.inf:
                        self._push(event.report_s, event)
                continue
            self.now_s = at_s
            if isinstance(event, SimulatedTransfer):
                self._end_transfer(event)
            elif isinstance(event, _Submission):
                self._submit(*event)
            else:
                self._arrive(event)

    def _push(self, at_s: float, event: _Event) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _arrive(self, arrival: Arrival) -> None:
        """Send a request to the replica that the router chooses."""
        request = TokenRequest(request_id=str(next(self._numbers)), prompt_ids=arrival.prompt_ids, params=_sampling(arrival.max_tokens))
        blocks = arrival.blocks or self._blocks(arrival.prompt_ids)
        route = Route(None, hash_prefix(blocks.hashes, self._settings.tokens_per_block, len(arrival.prompt_ids)), arrival.session)
        decision = self.router.choose(route)
        assert decision is not None  # no replica is ever full
        replica = self._replicas[decision.replica.name]
        try:
            replica.scheduler.check(request)
        except RequestError:
            self.results.num_rejected += 1
            self.results.longest_rejected = max(self.results.longest_rejected, len(arrival.prompt_ids) + arrival.max_tokens)
            return
        running = _Running(arrival, self.now_s, self.router.begin(route, decision))
        if self._frontends is None:
            self._submit(request, running, route, decision, blocks)
        else:
            at_s = self._frontends[replica.replica.name].receive(self.now_s, replica.steps)
            self._push(at_s, _Submission(request, running, route, decision, blocks))

    def _submit(self, request: TokenRequest, running: _Running, route: Route, decision: Decision, blocks: PromptBlocks) -> None:
        """The executor of the chosen replica receives a request."""
        replica = self._replicas[decision.replica.name]
        seq = Sequence(next(self._numbers), request, 0, self.now_s)
        seq.packed_blocks = list(blocks.packed)
        self._running[seq.seq_id] = running
        self.results.num_prompt_tokens += seq.num_prompt
        if self._links is None or (prefill := self.router.choose_prefill(route, decision)) is None:
            replica.add(seq, blocks.digests, self.now_s)
            self._run(replica)
        else:
            running.lease.start_decode()
            self._compute_elsewhere(route, prefill, seq, blocks.digests, replica)

    def _blocks(self, prompt_ids: list[int]) -> PromptBlocks:
        """The full blocks of a prompt. Without reuse, only the first one, which decides between equal replicas."""
        size = self._settings.tokens_per_block
        blocks = pack_blocks(prompt_ids if self._prefix_reuse else prompt_ids[:size], size)
        digests = block_digests(blocks, "")
        return PromptBlocks(blocks, digests, hashes_of_digests(digests))

    def _compute_elsewhere(self, route: Route, decision: Decision, seq: Sequence, digests: Seq[bytes], target: SimulatedReplica) -> None:
        """Let another replica compute the prompt of a sequence."""
        request = msgspec.structs.replace(seq.request, params=_sampling(1))
        prompt = Sequence(next(self._numbers), request, 0, self.now_s)
        prompt.packed_blocks = list(seq.packed_blocks)
        num_cached = len(target.scheduler.kv_cache.cached_prefix(seq.prefix_root, seq.tokens)) * self._settings.tokens_per_block
        assert self._links is not None
        self._links.add(SimulatedTransfer(prompt, seq, target, self.router.begin(route, decision), num_cached))
        computing = self._replicas[decision.replica.name]
        computing.add(prompt, digests, self.now_s)
        self._run(computing)

    def _end_transfer(self, transfer: SimulatedTransfer) -> None:
        """All blocks of a prompt have arrived."""
        self.results.transfer_s.append(self.now_s - transfer.computed_s)
        self.results.num_transferred_tokens += transfer.num_tokens
        self._running[transfer.seq.seq_id].num_cached = max(transfer.num_cached, transfer.prompt.num_cached)
        transfer.target.add_imported(transfer.seq, self.now_s)
        self._run(transfer.target)

    def _run(self, replica: SimulatedReplica) -> None:
        """Start steps of an idle replica if there is something to compute, or let a busy one plan its next step again."""
        if replica.run(self.now_s):
            self._expect(replica)

    def _expect(self, replica: SimulatedReplica) -> None:
        """Add the events of the running steps of a replica."""
        self._push(replica.end_s, replica)
        if replica.report_s != math.inf:
            self._push(replica.report_s, replica)

    def _end_steps(self, replica: SimulatedReplica, follow: Follow | None) -> None:
        """Measure the tokens of the ended steps, and start the next ones."""
        results, now = self.results, self.now_s
        steps, outcome = replica.end_steps(now)
        results.num_steps += steps.count
        if self._links is not None:
            for at_s, transfer in self._links.end_step(replica, steps.plan, now):
                transfer.lease.succeed()
                self._push(at_s, transfer)
        num_decodes = steps.plan.num_decodes  # before the next plan, which may be the same object
        started = replica.start(now)
        sent_s = replica.sent_s
        if num_decodes:
            if sent_s == now and steps.launched_s == steps.start_s:
                results.between_tokens_s.add_series(steps.first_s, steps.growth_s, steps.count, num_decodes)
            else:
                _add_gaps(results.between_tokens_s, steps, sent_s - now, num_decodes)
            results.num_output_tokens += num_decodes * steps.count
        first_s = received_s = sent_s  # when the client has first tokens, and the others
        if self._frontends is not None:
            first_s, received_s = self._frontends[replica.replica.name].send(sent_s, num_decodes + len(outcome.sequences))
        for seq in outcome.sequences:
            if (running := self._running.get(seq.seq_id)) is None:
                continue  # a prompt for another replica
            running.first_token_s = first_s - running.arrived_s
            results.num_reused_tokens += seq.num_cached if running.num_cached is None else running.num_cached
            results.num_output_tokens += 1
            running.lease.start_decode()
        for seq in outcome.finished:
            if (running := self._running.pop(seq.seq_id, None)) is None:
                continue
            running.lease.succeed()
            first_token_s, num_further = running.first_token_s, seq.max_tokens - 1
            duration_s = received_s - running.arrived_s if num_further else first_token_s
            results.first_token_s.append(first_token_s)
            results.token_s.append((duration_s - first_token_s) / num_further if num_further else 0.0)
            results.duration_s.append(duration_s)
            if follow is not None and (following := follow(running.arrival, seq, received_s)) is not None:
                self._push(following.at_s, following)
        if started:
            self._expect(replica)


def _add_gaps(gaps: Latencies, steps: RunningSteps, delay_s: float, num_decodes: int) -> None:
    """Add the times between the tokens of ended steps. Those of the last step are sent `delay_s` after its end."""
    waited_s = steps.launched_s - steps.start_s  # of the tokens before, for the launch of these steps
    if steps.count > 1:
        gaps.add_series(steps.first_s, steps.growth_s, steps.count - 1, num_decodes)
    last_s = steps.first_s + (steps.count - 1) * steps.growth_s - waited_s + delay_s
    gaps.add(max(last_s, MIN_GAP_S), num_decodes)


@lru_cache(1 << 16)
def _sampling(max_tokens: int) -> SamplingParams:
    """The parameters of a request; to check their values takes longer than to simulate it."""
    return SamplingParams(max_tokens=max_tokens, seed=0)
