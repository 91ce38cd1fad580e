"""Forwards one HTTP request: chooses a replica, sends the request, repeats it if the replica fails, and passes the response on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import aiohttp

from stoker.base.errors import StokerError, UnavailableError
from stoker.base.logging import get_logger
from stoker.router.core.policy import Decision, Route
from stoker.router.core.replica import Replica
from stoker.router.core.router import Lease, Router
from stoker.router.proxy.failures import Formats, whole_parts
from stoker.router.proxy.forwarded import Forwarded
from stoker.router.proxy.health import HealthChecker
from stoker.router.proxy.metrics import RouterMetrics
from stoker.router.proxy.owners import Owners
from stoker.router.proxy.prefills import Prefills, Send
from stoker.router.proxy.upstream import Upstream, UpstreamClient

log = get_logger(__name__)

BUSY = 429
FAILED = (502, 503, 504)  # the replica is draining, or its executor is lost; another one may serve the request


class ReplicaFailedError(UnavailableError):
    """A replica failed after it had answered a part of a request."""

    code = "replica_failed"


class Forwarder:
    """Forwards requests to the replicas of a router."""

    def __init__(
        self,
        router: Router,
        client: UpstreamClient,
        checker: HealthChecker,
        formats: Formats,
        metrics: RouterMetrics,
        owners: Owners,
        prefills: Prefills,
    ) -> None:
        self._router, self._client, self._checker = router, client, checker
        self._formats, self._metrics, self._owners, self._prefills = formats, metrics, owners, prefills

    async def forward(self, forwarded: Forwarded, *, only: Replica | None = None, repeatable: bool = True) -> None:
        """Forward a request and its response. It goes to the replica `only` if that is given.

        A request that is `repeatable` is sent to up to max_retries further replicas while the client has received nothing. Raises
        UnavailableError and QueueFullError if no replica can be chosen.
        """
        tried: list[Replica] = []
        refusal: Upstream | None = None  # the response of a replica that is busy or draining
        failure = ""  # of the last replica that did not answer
        num_retries = self._router.settings.max_retries if repeatable and only is None else 0
        while True:
            try:
                lease = await self._acquire(forwarded.route, tried, only, wait_for_available=refusal is None or refusal.status != BUSY)
            except UnavailableError:
                if refusal is not None:
                    await self._respond(forwarded, refusal)
                    return
                if failure:
                    raise UnavailableError(f"{failure}, and no other replica is available.", cure="Send the request again.") from None
                raise
            if not forwarded.num_attempts:
                self._metrics.choice.observe(time.monotonic() - forwarded.started_s)
                self._metrics.cached_tokens.inc(lease.num_cached)
                self._metrics.prompt_tokens.inc(forwarded.route.prefix.num_tokens)
            forwarded.replica, forwarded.num_cached = lease.replica, lease.num_cached
            forwarded.num_attempts += 1
            tried.append(lease.replica)
            prefill = self._prefills.begin(forwarded.route, lease, self._prompt_sender(forwarded)) if only is None else None
            forwarded.prefill = prefill.replica if prefill is not None else None
            try:
                ticket = prefill.ticket if prefill is not None else ""
                upstream = await self._client.send(lease.replica, forwarded.http, forwarded.target, forwarded.body, ticket)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._fail(lease)
                failure = f"the replica {lease.replica.name} failed: {_reason(error)}"
                if len(tried) > num_retries:
                    raise UnavailableError(f"{failure}.", cure="Send the request again.") from None
                log.warning("%s failed, the request is repeated: %s", lease.replica.name, _reason(error))
                continue
            except BaseException:
                self._cancel(lease)
                raise
            finally:  # the first part of the answer, or a failure: the prompt is not needed any more
                if prefill is not None:
                    prefill.end()
            if upstream.status == BUSY or upstream.status in FAILED:
                self._cancel(lease) if upstream.status == BUSY else self._fail(lease)
                if len(tried) <= num_retries:
                    refusal = upstream
                    continue
                await self._respond(forwarded, upstream)
                return
            await self._pass_on(forwarded, lease, upstream)
            return

    def _prompt_sender(self, forwarded: Forwarded) -> Send:
        """The function that lets a replica compute the prompt of a request."""

        async def send(replica: Replica, ticket: str) -> str:
            """Send the request with a ticket."""
            try:
                upstream = await self._client.send(replica, forwarded.http, forwarded.target, forwarded.body, ticket)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ConnectionError(_reason(error)) from None
            upstream.close()
            return "" if upstream.status == 200 else f"status {upstream.status} {upstream.first[:200].decode(errors='replace')}"

        return send

    async def _acquire(self, route: Route, tried: list[Replica], only: Replica | None, *, wait_for_available: bool) -> Lease:
        """A lease of the chosen replica, or of `only`."""
        if only is None:
            return await self._router.acquire(route, tried, wait_for_available=wait_for_available)
        return self._router.begin(route, Decision(only, 0))

    async def _pass_on(self, forwarded: Forwarded, lease: Lease, upstream: Upstream) -> None:
        """Pass the response on, and end the lease."""
        lease.start_decode()
        self._owners.learn(lease.replica, upstream.first)
        try:
            if upstream.is_whole:
                await self._respond(forwarded, upstream)
            else:
                await self._stream(forwarded, upstream)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._fail(lease)
            await self._end_with_error(forwarded, upstream, lease.replica, error)
        except BaseException:
            self._cancel(lease)
            raise
        else:
            self._metrics.attempts.labels(lease.replica.name, "ok").inc()
            lease.succeed()
        finally:
            upstream.close()

    async def _respond(self, forwarded: Forwarded, upstream: Upstream) -> None:
        """Send a response that was read completely, or that is an error."""
        self._note_first_byte(forwarded, upstream.first)
        forwarded.num_bytes = len(upstream.first)
        await forwarded.http.respond(upstream.status, upstream.first, upstream.content_type, upstream.headers)
        upstream.close()

    async def _stream(self, forwarded: Forwarded, upstream: Upstream) -> None:
        """Send the parts of a response as they arrive, in whole events or lines."""
        http, kind = forwarded.http, upstream.content_type
        self._note_first_byte(forwarded, upstream.first)
        await http.open_stream(kind, upstream.status, upstream.headers)
        held = upstream.first
        if size := whole_parts(kind, held):
            await http.send(held[:size])
            forwarded.num_bytes += size
            held = held[size:]
        async for part in upstream.rest():
            held += part
            if size := whole_parts(kind, held):
                await http.send(held[:size])
                forwarded.num_bytes += size
                held = held[size:]
        if held:
            await http.send(held)
            forwarded.num_bytes += len(held)
        await http.close_stream()

    async def _end_with_error(self, forwarded: Forwarded, upstream: Upstream, replica: Replica, error: BaseException) -> None:
        """End a stream whose replica has failed with an error in the format of its API, or by closing the connection."""
        forwarded.error = f"{replica.name} failed in the middle of its response: {_reason(error)}"
        failure: StokerError = ReplicaFailedError("the replica failed in the middle of its response.", cure="Send the request again.")
        last = self._formats.in_stream(forwarded.path, upstream.content_type, failure)
        if last is None:
            raise failure
        await forwarded.http.send(last)
        await forwarded.http.close_stream()

    def _note_first_byte(self, forwarded: Forwarded, first: bytes) -> None:
        """Measure the time to the first part of the response."""
        forwarded.first_byte_s = time.monotonic() - forwarded.started_s
        self._metrics.first_byte.observe(forwarded.first_byte_s)

    def _fail(self, lease: Lease) -> None:
        """The replica failed: check its health at once."""
        self._metrics.attempts.labels(lease.replica.name, "failed").inc()
        lease.fail()
        self._checker.check_soon(lease.replica)

    def _cancel(self, lease: Lease) -> None:
        """The request ended for another reason."""
        self._metrics.attempts.labels(lease.replica.name, "cancelled").inc()
        lease.cancel()

    async def to_all(self, forwarded: Forwarded, replicas: Iterable[Replica]) -> None:
        """Send a request to all replicas, and respond with the first refusal, or else with the last response."""
        replicas = list(replicas)
        if not replicas:
            raise UnavailableError("no replica is available.", cure="Retry later.")
        results = await asyncio.gather(
            *(self._client.send(replica, forwarded.http, forwarded.target, forwarded.body) for replica in replicas), return_exceptions=True
        )
        forwarded.num_attempts = len(replicas)
        responses: list[Upstream] = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, Upstream):
                responses.append(result)
            else:
                self._checker.check_soon(replica)
                raise UnavailableError(f"the replica {replica.name} failed: {_reason(result)}.", cure="Send the request again.")
        await self._respond(forwarded, next((each for each in responses if each.status >= 300), responses[-1]))
        for response in responses:
            response.close()


def _reason(error: Any) -> str:
    """The reason of a failed request in one line."""
    return str(error) or type(error).__name__
