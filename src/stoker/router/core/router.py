"""The router: chooses a replica for each request, counts the requests in flight, and lets requests wait while no replica has room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from stoker.base.errors import QueueFullError, UnavailableError
from stoker.router.core.fair_queue import FairQueue
from stoker.router.core.fleet import Fleet
from stoker.router.core.policy import POLICY_CLASSES, Decision, Route
from stoker.router.core.replica import Replica
from stoker.router.core.settings import RoutingSettings

RETRY_AFTER_S = 1.0


class Lease:
    """A request that is sent to a replica. Exactly one of `succeed`, `fail` and `cancel` ends it; further calls have no effect."""

    __slots__ = ("_ended", "_prefill_tokens", "_router", "num_cached", "replica")

    def __init__(self, router: Router, replica: Replica, num_cached: int, prefill_tokens: int) -> None:
        self._router = router
        self.replica = replica
        self.num_cached = num_cached  # leading tokens of the prompt that the replica holds
        self._prefill_tokens = prefill_tokens
        self._ended = False

    def start_decode(self) -> None:
        """The first token has arrived: the prompt is computed."""
        if self._prefill_tokens:
            self.replica.prefill_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            self._router.fleet.refresh_load(self.replica, self._router.clock())

    def succeed(self) -> None:
        """The replica has answered."""
        self._end(self.replica.breaker.on_success)

    def fail(self) -> None:
        """The replica has failed."""
        self._end(lambda: self.replica.breaker.on_failure(self._router.clock()))

    def cancel(self) -> None:
        """The request ended for a reason that says nothing about the replica: its client left, or the replica was busy."""
        self._end(self.replica.breaker.on_cancel)

    def _end(self, report: Callable[[], None]) -> None:
        if self._ended:
            return
        self._ended = True
        router, replica = self._router, self.replica
        was_closed = replica.breaker.is_closed
        report()
        replica.prefill_tokens -= self._prefill_tokens
        replica.num_in_flight -= 1
        if was_closed:
            router.fleet.refresh_load(replica, router.clock())
        else:  # the breaker may have closed
            router.fleet.refresh(replica, router.clock())
        router.serve_waiting()


class _Waiting:
    """A request that waits for a replica. Those in `excluded` have failed it before."""

    def __init__(self, route: Route, excluded: tuple[Replica, ...], since_s: float, until_available: bool) -> None:
        self.route, self.excluded, self.since_s, self.until_available = route, excluded, since_s, until_available
        self.future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self.number = -1

    def enter(self, queue: FairQueue[_Waiting]) -> None:
        """Enter the queue of the model."""
        route = self.route
        self.number = queue.push(self, (route.tenant, route.adapter, route.session), 1 + route.prefix.num_tokens)


class Router:
    """Decisions for one fleet. Use it from one event loop only. `clock` returns monotonic seconds."""

    def __init__(self, settings: RoutingSettings = RoutingSettings(), clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.fleet = Fleet(settings)
        self._policy = POLICY_CLASSES[settings.policy](self.fleet)
        self._queues: dict[str | None, FairQueue[_Waiting]] = {}  # by model
        self.on_unavailable: Callable[[], None] = lambda: None  # called when a request begins to wait because no replica is available

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait because no replica has room."""
        return sum(map(len, self._queues.values()))

    def choose(self, route: Route, excluded: Iterable[Replica] = ()) -> Decision | None:
        """The replica for a request, or None if all available ones have as many requests as they may have.

        Raises UnavailableError if no replica outside `excluded` is available.
        """
        candidates = self._candidates(route.model, excluded)
        if not candidates:
            raise UnavailableError(self._why_unavailable(route.model), cure="Retry later.")
        with_room = candidates & ~self.fleet.full
        return self._policy.choose(route, with_room) if with_room else None

    def begin(self, route: Route, decision: Decision) -> Lease:
        """Count the request as sent to the chosen replica."""
        replica, prefix, now = decision.replica, route.prefix, self.clock()
        prefill_tokens = max(0, prefix.num_tokens - decision.num_cached)
        replica.num_in_flight += 1
        replica.num_requests += 1
        replica.prefill_tokens += prefill_tokens
        replica.breaker.on_send()
        if prefix.exact and replica.publishes_events:
            self.fleet.recent.store(replica.slot, prefix.hashes[decision.num_cached // prefix.tokens_per_block :], now)
        elif prefix.hashes:
            self.fleet.assumed.store(replica.slot, prefix.hashes, now)
        self.fleet.refresh_load(replica, now)
        return Lease(self, replica, decision.num_cached, prefill_tokens)

    def choose_prefill(self, route: Route, decision: Decision) -> Decision | None:
        """The replica that computes the prompt of a request for the chosen one; None if the chosen one should compute it itself.

        That is the case for prompts with fewer than disaggregate_tokens uncached tokens, and while too many tokens wait on all replicas
        that could compute them.
        """
        settings, fleet, prefix = self.settings, self.fleet, route.prefix
        chosen, missing = decision.replica, prefix.num_tokens - decision.num_cached
        if not settings.disaggregate_tokens or missing < settings.disaggregate_tokens:
            return None
        if chosen.transfer is None or chosen.transfer.role == "prefill":
            return None
        candidates = fleet.available & fleet.serving(route.model) & fleet.exporting & ~fleet.full & ~(1 << chosen.slot)
        candidates = candidates & fleet.prefill_only or candidates
        if not candidates:
            return None
        found = self._policy.choose(route, candidates)
        limit = settings.max_prefill_load
        if not fleet.prefill_only >> found.replica.slot & 1:  # it generates answers, too
            limit = min(limit, fleet.loads.get(chosen.slot) - 1)
        return found if fleet.loads.get(found.replica.slot) <= limit else None

    async def acquire(self, route: Route, excluded: Iterable[Replica] = (), *, wait_for_available: bool = True) -> Lease:
        """Choose a replica and count the request as sent. Waits while no replica has room.

        With `wait_for_available`, it also waits for unavailable_timeout_s if no replica outside `excluded` is available; one in `excluded`
        counts again after a health check has found it ready. Requests that wait are served in fair order over tenants, their adapters and
        their sessions. Raises UnavailableError, also after queue_timeout_s, and QueueFullError.
        """
        excluded = tuple(excluded)
        may_wait = wait_for_available and self.settings.unavailable_timeout_s > 0
        if may_wait and not self._candidates(route.model, excluded):
            self.on_unavailable()
            return await self._wait(_Waiting(route, excluded, self.clock(), may_wait), self.settings.unavailable_timeout_s)
        if not self._queues.get(route.model) and (decision := self.choose(route, excluded)) is not None:
            return self.begin(route, decision)
        return await self._wait(_Waiting(route, excluded, self.clock(), may_wait), self.settings.queue_timeout_s)

    async def _wait(self, waiting: _Waiting, timeout_s: float) -> Lease:
        """Wait in the queue of the model."""
        route, future = waiting.route, waiting.future
        if (num_waiting := self.num_waiting) >= self.settings.max_queue_size:
            raise QueueFullError(num_waiting, self.settings.max_queue_size, RETRY_AFTER_S)
        queue = self._queues.setdefault(route.model, FairQueue())
        waiting.enter(queue)
        self.serve_waiting()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            if future.done() and not future.cancelled() and future.exception() is None:
                return future.result()
            if not self._candidates(route.model, ()):
                raise UnavailableError(self._why_unavailable(route.model), cure="Retry later.") from None
            raise UnavailableError(f"no replica had room for {timeout_s:g} s.", cure="Retry later.") from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().cancel()
            raise
        finally:
            queue.discard(waiting.number)
            if not queue:
                self._queues.pop(route.model, None)

    def serve_waiting(self) -> None:
        """Send waiting requests to replicas that have room. Called after a request has ended, and after changes of the fleet."""
        if not self._queues:
            return
        for model, queue in list(self._queues.items()):
            held: list[_Waiting] = []
            while queue and (not (candidates := self._candidates(model, ())) or candidates & ~self.fleet.full):
                if not candidates and self.settings.unavailable_timeout_s:
                    break
                waiting = queue.pop()
                if waiting.future.done():
                    continue
                with_room = candidates & ~self.fleet.full
                mask = with_room & ~self._mask(replica for replica in waiting.excluded if replica.ready_s <= waiting.since_s)
                if not mask and not waiting.until_available:
                    mask = with_room
                if mask:
                    waiting.future.set_result(self.begin(waiting.route, self._policy.choose(waiting.route, mask)))
                elif waiting.until_available:
                    held.append(waiting)
                else:
                    waiting.future.set_exception(UnavailableError(self._why_unavailable(model), cure="Retry later."))
            for waiting in held:
                waiting.enter(queue)

    def remove(self, replica: Replica) -> None:
        """Remove a replica; its requests in flight continue."""
        self._policy.forget(replica.slot)
        self.fleet.remove(replica)
        self.serve_waiting()

    def _candidates(self, model: str | None, excluded: Iterable[Replica]) -> int:
        """The available replicas that serve the model; those that only compute prompts for others if there is none else."""
        candidates = self.fleet.available & self.fleet.serving(model)
        if excluded:
            candidates &= ~self._mask(excluded)
        return candidates & ~self.fleet.prefill_only or candidates

    def _mask(self, replicas: Iterable[Replica]) -> int:
        """The mask of those replicas that are still in the fleet."""
        mask = 0
        for replica in replicas:
            if self.fleet.contains(replica):
                mask |= 1 << replica.slot
        return mask

    def _why_unavailable(self, model: str | None) -> str:
        """A message that counts the states of the replicas."""
        if not len(self.fleet):
            return "the router has no replicas."
        states: dict[str, int] = {}
        for replica in self.fleet:
            if self.fleet.serving(model) >> replica.slot & 1:
                state = "draining" if replica.draining else "paused after failures" if replica.health == "ready" else str(replica.health)
                states[state] = states.get(state, 0) + 1
        return "no replica is available: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items())) + "."
