"""The routes under /router: list, add, remove and drain replicas."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from stoker.base.errors import NotFoundError, RequestError
from stoker.router.core.replica import Replica
from stoker.router.core.router import Router
from stoker.router.settings import RouterSettings, check_url
from stoker.server.errors import AuthenticationError, MethodError, RouteError
from stoker.server.http.request_context import RequestContext


class Admin:
    """`add` and `remove` change the fleet and the health checks."""

    def __init__(
        self, router: Router, settings: RouterSettings, add: Callable[[str], Replica], remove: Callable[[Replica], Awaitable[None]]
    ) -> None:
        self._router, self._settings, self._add, self._remove = router, settings, add, remove

    async def handle(self, http: RequestContext, path: str) -> None:
        """Answer a request whose path starts with /router. Raises StokerError."""
        self._check_key(http)
        if path == "/router/replicas":
            await self._replicas(http)
        elif path in ("/router/replicas/drain", "/router/replicas/resume"):
            if http.method != "POST":
                raise MethodError(http.method, ["POST"])
            replica = self._find(await self._url(http))
            replica.draining = path.endswith("drain")
            self._router.fleet.refresh(replica, self._router.clock())
            self._router.serve_waiting()
            await self._respond(http, describe_replica(self._router, replica))
        else:
            raise RouteError(path)

    async def _replicas(self, http: RequestContext) -> None:
        """GET: list. POST {"url": …}: add. DELETE ?url=…: remove."""
        match http.method:
            case "GET" | "HEAD":
                rows = [describe_replica(self._router, replica) for replica in self._router.fleet]
                await self._respond(http, {"replicas": rows, "waiting": self._router.num_waiting})
            case "POST":
                url = check_url(await self._url(http))
                if url in self._router.fleet:
                    raise RequestError("url", url, "the router has this replica already")
                await self._respond(http, describe_replica(self._router, self._add(url)))
            case "DELETE":
                replica = self._find(parse_qs(http.query.decode("latin-1")).get("url", [""])[0])
                row = describe_replica(self._router, replica)
                await self._remove(replica)
                await self._respond(http, row)
            case method:
                raise MethodError(method, ["GET", "POST", "DELETE"])

    def _find(self, url: str) -> Replica:
        """The replica with this URL. Raises NotFoundError."""
        if (replica := self._router.fleet.get(url)) is None:
            raise NotFoundError(f"the router has no replica {url[:200]!r}.", cure="GET /router/replicas lists them.")
        return replica

    async def _url(self, http: RequestContext) -> str:
        """The member `url` of the body. Raises RequestError."""
        url = (await http.json()).get("url")
        if not isinstance(url, str):
            raise RequestError("url", url, "it must be the URL of a replica")
        return url

    async def _respond(self, http: RequestContext, value: Any) -> None:
        await http.respond(200, msgspec.json.encode(value))

    def _check_key(self, http: RequestContext) -> None:
        """Raise AuthenticationError unless the request has the admin key, or none is needed."""
        if self._settings.admin_is_open:
            return
        if self._settings.admin_key is None:
            raise AuthenticationError(
                "the routes under /router are closed: the router is reachable from other machines.", cure="Start it with --admin-key."
            )
        scheme, _, key = http.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._settings.admin_key.encode()):
            raise AuthenticationError("the admin key is missing or wrong.", cure="Send the header Authorization: Bearer KEY.")


def describe_replica(router: Router, replica: Replica) -> dict[str, Any]:
    """The state of a replica as JSON."""
    return {
        "url": replica.name,
        "health": replica.health,
        "reason": replica.reason,
        "draining": replica.draining,
        "circuit": replica.breaker.state,
        "models": sorted(replica.models),
        "requests_in_flight": replica.num_in_flight,
        "requests_of_others": replica.num_others,
        "load_tokens": router.fleet.loads.get(replica.slot),
        "known_blocks": router.fleet.stored.num_blocks(replica.slot),
        "publishes_events": replica.publishes_events,
        "requests_total": replica.num_requests,
    }
