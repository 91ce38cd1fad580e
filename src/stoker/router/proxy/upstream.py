"""HTTP requests to replicas: the head and the first part of a response, and then the rest of its body."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from stoker.router.core.replica import Replica
from stoker.router.settings import RouterSettings
from stoker.runtime.transfer.ticket import HEADER
from stoker.server.http.request_context import RequestContext

# Headers that concern one connection only, or that are written anew.
_HOP_BY_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"content-length", b"host", b"expect",
}  # fmt: skip
_NOT_FORWARDED = _HOP_BY_HOP | {HEADER}
_OWN = {b"date", b"server", b"content-type", b"x-request-id"}  # of responses; the router writes them
WHOLE_BYTES = 4 << 20  # a response of known length up to this size is read completely before it is passed on
READ_BYTES = 1 << 20


class Upstream:
    """A response of a replica whose head and first part have arrived. `close` ends the request if it has not ended."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        self._response = response
        self.first = first
        self.status = response.status
        self.content_type = b""
        self.headers: list[tuple[bytes, bytes]] = []
        for name, value in response.raw_headers:
            lower = name.lower()
            if lower == b"content-type":
                self.content_type = value
            elif lower not in _HOP_BY_HOP and lower not in _OWN:
                self.headers.append((lower, value))
        length = response.headers.get("content-length", "")
        self.is_whole = length.isdigit() and int(length) == len(first)

    async def rest(self) -> AsyncIterator[bytes]:
        """The parts of the body after the first one. Raises aiohttp.ClientError if the replica fails."""
        async for part in self._response.content.iter_any():
            yield part

    def close(self) -> None:
        """Close the connection, unless the response has been read to its end."""
        self._response.close()


class UpstreamClient:
    """Sends requests to replicas over connections that are used again."""

    def __init__(self, session: aiohttp.ClientSession, settings: RouterSettings) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
        self._key = settings.replica_api_key if settings.api_keys else None

    async def send(self, replica: Replica, http: RequestContext, target: str, body: bytes, ticket: str = "") -> Upstream:
        """Send the client's request, and wait for the first part of the body. Raises aiohttp.ClientError and TimeoutError.

        `ticket`: of a transfer of the prompt; empty for none.
        """
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in http.headers.items() if name not in _NOT_FORWARDED]
        if ticket:
            headers.append((HEADER.decode(), ticket))
        if self._key is not None:
            headers = [header for header in headers if header[0] not in ("authorization", "x-api-key")]
            headers.append(("authorization", f"Bearer {self._key}"))
        headers = [*(header for header in headers if header[0] != "x-request-id"), ("x-request-id", http.request_id)]
        response = await self._session.request(
            http.method, replica.name + target, headers=headers, data=body if body else None, timeout=self._timeout,
            allow_redirects=False, skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        )  # fmt: skip
        try:
            length = response.headers.get("content-length", "")
            if length.isdigit() and int(length) <= WHOLE_BYTES:
                return Upstream(response, await response.read())
            return Upstream(response, await response.content.readany())
        except BaseException:
            response.close()
            raise
