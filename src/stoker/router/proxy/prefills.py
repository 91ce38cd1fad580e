"""Prompts that one replica computes for another one, which reads the KV cache blocks and generates the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from stoker.base.logging import get_logger
from stoker.router.core.policy import Decision, Route
from stoker.router.core.replica import Replica
from stoker.router.core.router import Lease, Router
from stoker.router.proxy.health import HealthChecker
from stoker.router.proxy.metrics import RouterMetrics
from stoker.runtime.transfer.address import WILDCARDS
from stoker.runtime.transfer.ticket import make_tickets, transfer_key

log = get_logger(__name__)


# Sends a request with a ticket to a replica. Returns why it computes no prompt, or an empty text. Raises ConnectionError if it has failed.
Send = Callable[[Replica, str], Awaitable[str]]


class Prefill:
    """One such prompt. `ticket` goes to the replica that generates the answer; `replica` computes the prompt."""

    def __init__(self, ticket: str, replica: Replica, task: asyncio.Task[None]) -> None:
        self.ticket, self.replica = ticket, replica
        self._task = task

    def end(self) -> None:
        """The other replica has answered or failed: cancel the request if it still runs."""
        self._task.cancel()


class Prefills:
    """Sends requests to the replicas that compute their prompts."""

    def __init__(self, router: Router, metrics: RouterMetrics, checker: HealthChecker) -> None:
        self._router, self._metrics, self._checker = router, metrics, checker
        self._key = transfer_key()
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned = False

    def begin(self, route: Route, lease: Lease, send: Send, accepts: Callable[[Replica], bool] = lambda replica: True) -> Prefill | None:
        """Let another replica, which `accepts` the request, compute the prompt of one that is about to be sent, if that is better."""
        decision = self._router.choose_prefill(route, Decision(lease.replica, lease.num_cached))
        if decision is None or not accepts(decision.replica):
            return None
        if self._key is None:
            if not self._warned:
                log.warning("replicas compute all prompts themselves: transfers need STOKER_CLUSTER_TOKEN, as on the replicas")
                self._warned = True
            return None
        host, port = _address(decision.replica)
        export, ticket = make_tickets(host, port, self._key)
        lease.start_decode()  # the other replica has the load of the prompt
        computing = self._router.begin(route, decision)
        task = asyncio.create_task(self._compute(send, computing, export))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: computing.cancel())  # a task that is cancelled before it has started runs no code of its own
        return Prefill(ticket, decision.replica, task)

    async def _compute(self, send: Send, lease: Lease, ticket: str) -> None:
        """Send the request with its ticket. The replica answers when it has computed the prompt, whose blocks it then holds for a while."""
        outcome, name = "cancelled", lease.replica.name
        try:
            refusal = await send(lease.replica, ticket)
            outcome = "failed" if refusal else "ok"
            if refusal:
                log.warning("%s computes no prompt: %s", name, refusal)
            else:
                lease.succeed()
        except ConnectionError as error:
            outcome = "failed"
            lease.fail()
            self._checker.check_soon(lease.replica)
            log.warning("%s failed while it computed a prompt: %s", name, error)
        finally:
            self._metrics.prefills.labels(name, outcome).inc()


def _address(replica: Replica) -> tuple[str, int]:
    """The transfer address of a replica. A wildcard stands for the host of its URL."""
    transfer: Any = replica.transfer
    host = urlsplit(replica.name).hostname if transfer.host in WILDCARDS else transfer.host
    return host or transfer.host, transfer.port
