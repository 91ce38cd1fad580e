"""Checks at intervals what each replica reports about itself, and whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
import msgspec
import zmq.asyncio

from stoker.base.logging import get_logger
from stoker.router.core.replica import Replica, ReplicaState
from stoker.router.core.router import Router
from stoker.router.settings import RouterSettings
from stoker.router.subscriber import EventSubscriber
from stoker.server.replica_report import ReplicaReport

log = get_logger(__name__)

MAX_REPORT_BYTES = 1 << 20
NUM_MISSED = 2  # health checks without an answer, after which a replica is unreachable; a refused connection counts at once


class HealthChecker:
    """One task per replica that requests its report, and applies it to the router: health, models, load, and block events."""

    def __init__(self, router: Router, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self.reports: dict[str, ReplicaReport] = {}  # the last one of each replica that answered
        self._router = router
        self._settings = settings
        self._session = session
        self._headers = {"authorization": f"Bearer {settings.replica_api_key}"} if settings.replica_api_key else {}
        self._zmq = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._soon: dict[str, asyncio.Event] = {}
        self._subscribers: dict[str, EventSubscriber] = {}
        self._num_missed: dict[str, int] = {}

    def watch(self, replica: Replica) -> None:
        """Check this replica from now on."""
        self._soon[replica.name] = asyncio.Event()
        self._tasks[replica.name] = asyncio.create_task(self._run(replica))

    async def forget(self, replica: Replica) -> None:
        """Check this replica no more."""
        task = self._tasks.pop(replica.name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._unsubscribe(replica)
        for table in (self._soon, self.reports, self._num_missed):
            table.pop(replica.name, None)

    def check_soon(self, replica: Replica) -> None:
        """Check this replica at once, because a request to it failed."""
        if (event := self._soon.get(replica.name)) is not None:
            event.set()

    async def close(self) -> None:
        """End all tasks."""
        for replica in list(self._router.fleet):
            if replica.name in self._tasks:
                await self.forget(replica)
        self._zmq.destroy(linger=0)

    async def _run(self, replica: Replica) -> None:
        """Check the replica until the task is cancelled."""
        soon = self._soon[replica.name]
        while True:
            soon.clear()
            try:
                await self.check(replica)
            except Exception:
                log.exception("the health check of %s failed", replica.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.health_interval_s):
                    await soon.wait()

    async def check(self, replica: Replica) -> None:
        """Request the report of a replica, and apply it."""
        try:
            async with asyncio.timeout(self._settings.health_timeout_s):
                async with self._session.get(f"{replica.name}/health/replica", headers=self._headers) as response:
                    body = await response.content.read(MAX_REPORT_BYTES)
                    status = response.status
        except aiohttp.ClientConnectorError as error:
            await self._miss(replica, str(error), at_once=True)
            return
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._miss(replica, str(error) or f"no answer within {self._settings.health_timeout_s:g} s")
            return
        self._num_missed[replica.name] = 0
        try:
            if status != 200:
                raise ValueError(f"/health/replica answers {status}")
            report = msgspec.json.decode(body, type=ReplicaReport)
        except (msgspec.MsgspecError, ValueError) as error:
            self._set_health(replica, ReplicaState.NOT_READY, str(error))
            return
        await self._apply(replica, report)

    async def _miss(self, replica: Replica, reason: str, *, at_once: bool = False) -> None:
        """The replica did not answer."""
        self._num_missed[replica.name] = self._num_missed.get(replica.name, 0) + 1
        if at_once or self._num_missed[replica.name] >= NUM_MISSED:
            await self._unsubscribe(replica)
            self._set_health(replica, ReplicaState.UNREACHABLE, reason)

    async def _apply(self, replica: Replica, report: ReplicaReport) -> None:
        """Apply the report of a replica that answered."""
        self.reports[replica.name] = report
        fleet = self._router.fleet
        if frozenset(report.models) != replica.models:
            fleet.set_models(replica, report.models)
        replica.tokens_per_block = report.tokens_per_block
        if report.is_recent:  # otherwise it does not contain the same requests as num_in_flight
            replica.num_others = max(0, report.num_running + report.num_waiting - replica.num_in_flight)
        if self._router.settings.max_in_flight is None and report.max_batch_size:
            replica.max_in_flight = 2 * report.max_batch_size
        fleet.set_transfer(replica, report.info.transfer if report.info is not None else None)
        await self._subscribe(replica, report)
        if report.models:
            self._set_health(replica, ReplicaState.READY, "")
        else:
            self._set_health(replica, ReplicaState.NOT_READY, report.reason or "no model is ready")

    def _set_health(self, replica: Replica, health: ReplicaState, reason: str) -> None:
        """Set the health of a replica, and log a change."""
        if health is not replica.health:
            log.log(
                30 if health in (ReplicaState.UNREACHABLE, ReplicaState.NOT_READY) else 20,
                "%s is %s%s",
                replica.name,
                health,
                reason and f": {reason}",
            )
        now = time.monotonic()
        self._router.fleet.set_health(replica, health, now, reason)
        if health is ReplicaState.READY and not replica.breaker.is_closed and replica.breaker.allows(now):
            self._router.fleet.refresh(replica, now)
        self._router.serve_waiting()

    async def _subscribe(self, replica: Replica, report: ReplicaReport) -> None:
        """Read the block events that the report names. A change of the address starts anew."""
        address = report.info.kv_events if report.info is not None else None
        present = self._subscribers.get(replica.name)
        if present is not None and present.address != address:
            await self._unsubscribe(replica)
            self._router.fleet.forget_blocks(replica)
            present = None
        if address is not None and present is None:
            self._subscribers[replica.name] = EventSubscriber(self._router.fleet, replica, address, self._zmq)

    async def _unsubscribe(self, replica: Replica) -> None:
        """Read no more block events of a replica."""
        if (subscriber := self._subscribers.pop(replica.name, None)) is not None:
            await subscriber.close()
