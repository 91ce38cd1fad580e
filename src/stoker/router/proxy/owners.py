"""Which replica stores a response, file or batch. Learned from the responses that create them, or by a request to each replica."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import aiohttp

from stoker.router.core.replica import Replica
from stoker.router.core.router import Router
from stoker.router.proxy.paths import CREATED_BYTES, CREATED_ID
from stoker.router.proxy.upstream import UpstreamClient
from stoker.server.http.request_context import RequestContext

MAX_KNOWN = 1 << 16
MAX_PROBES = 64  # replicas that are requested at the same time
_FOLDERS = {b"resp": "responses", b"file": "files", b"batc": "batches"}


class Owners:
    """Object path, such as /v1/responses/resp_1 → the name of a replica. The oldest ones are forgotten."""

    def __init__(self, router: Router, client: UpstreamClient) -> None:
        self._router = router
        self._client = client
        self._known: OrderedDict[str, str] = OrderedDict()

    def learn(self, replica: Replica, first: bytes) -> None:
        """Note the object that a response with this first part has created."""
        if (match := CREATED_ID.search(first[:CREATED_BYTES])) is not None:
            self._remember(f"/v1/{_FOLDERS[match[1][:4]]}/{match[1].decode()}", replica)

    async def find(self, object_path: str, http: RequestContext) -> Replica | None:
        """The replica that stores an object, or None. An unknown object is requested from all replicas with the client's key."""
        if (name := self._known.get(object_path)) is not None and (replica := self._router.fleet.get(name)) is not None:
            return replica
        places = asyncio.Semaphore(MAX_PROBES)
        replicas = [replica for replica in self._router.fleet if self._router.fleet.available >> replica.slot & 1]

        async def has(replica: Replica) -> bool:
            """Whether a replica stores the object."""
            async with places:
                probe = RequestContext({"method": "GET", "headers": list(http.headers.items())}, None, None, max_body_bytes=0)
                try:
                    upstream = await self._client.send(replica, probe, object_path, b"")
                except (aiohttp.ClientError, TimeoutError):
                    return False
                upstream.close()
                return upstream.status == 200

        found = await asyncio.gather(*map(has, replicas))
        owner = next((replica for replica, stores in zip(replicas, found, strict=True) if stores), None)
        if owner is not None:
            self._remember(object_path, owner)
        return owner

    def _remember(self, object_path: str, replica: Replica) -> None:
        """Note the replica of an object."""
        self._known[object_path] = replica.name
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
