"""Prompts that one replica computes for another one, which reads the KV cache blocks and generates the answer."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from stoker.base.logging import get_logger
from stoker.router.core.policy import Decision
from stoker.router.core.replica import Replica
from stoker.router.core.router import Lease, Router
from stoker.router.proxy.forwarded import Forwarded
from stoker.router.proxy.health import HealthChecker
from stoker.router.proxy.metrics import RouterMetrics
from stoker.router.proxy.upstream import UpstreamClient
from stoker.runtime.transfer.address import WILDCARDS
from stoker.runtime.transfer.ticket import make_tickets, transfer_key

log = get_logger(__name__)


class Prefill:
    """One such prompt. `ticket` goes to the replica that generates the answer."""

    def __init__(self, ticket: str, task: asyncio.Task[None]) -> None:
        self.ticket = ticket
        self._task = task

    def end(self) -> None:
        """The other replica has answered or failed: cancel the request if it still runs."""
        self._task.cancel()


class Prefills:
    """Sends requests to the replicas that compute their prompts."""

    def __init__(self, router: Router, client: UpstreamClient, metrics: RouterMetrics, checker: HealthChecker) -> None:
        self._router, self._client, self._metrics, self._checker = router, client, metrics, checker
        self._key = transfer_key()
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned = False

    def begin(self, forwarded: Forwarded, lease: Lease) -> Prefill | None:
        """Let another replica compute the prompt of a request that is about to be sent, if that is better. None if it is not."""
        decision = self._router.choose_prefill(forwarded.route, Decision(lease.replica, lease.num_cached))
        forwarded.prefill = decision.replica if decision is not None else None
        if decision is None:
            return None
        if self._key is None:
            if not self._warned:
                log.warning("replicas compute all prompts themselves: transfers need STOKER_CLUSTER_TOKEN, as on the replicas")
                self._warned = True
            forwarded.prefill = None
            return None
        host, port = _address(decision.replica)
        export, ticket = make_tickets(host, port, self._key)
        lease.start_decode()  # the other replica has the load of the prompt
        task = asyncio.create_task(self._compute(forwarded, self._router.begin(forwarded.route, decision), export))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Prefill(ticket, task)

    async def _compute(self, forwarded: Forwarded, lease: Lease, ticket: str) -> None:
        """Send the request with its ticket. The replica answers when it has computed the prompt, whose blocks it then holds for a while."""
        outcome, name = "cancelled", lease.replica.name
        try:
            upstream = await self._client.send(lease.replica, forwarded.http, forwarded.target, forwarded.body, ticket)
            upstream.close()
            outcome = "ok" if upstream.status == 200 else "failed"
            if outcome == "ok":
                lease.succeed()
            else:
                log.warning("%s computes no prompt: status %d %s", name, upstream.status, upstream.first[:200].decode(errors="replace"))
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome = "failed"
            lease.fail()
            self._checker.check_soon(lease.replica)
            log.warning("%s failed while it computed a prompt: %s", name, str(error) or type(error).__name__)
        finally:
            lease.cancel()  # without effect if the lease has ended
            self._metrics.prefills.labels(name, outcome).inc()


def _address(replica: Replica) -> tuple[str, int]:
    """The transfer address of a replica. A wildcard stands for the host of its URL."""
    transfer: Any = replica.transfer
    host = urlsplit(replica.name).hostname if transfer.host in WILDCARDS else transfer.host
    return host or transfer.host, transfer.port
