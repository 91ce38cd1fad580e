"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from stoker.base.errors import StokerError, UnavailableError
from stoker.base.logging import get_logger
from stoker.frontend.repository import ModelRepository
from stoker.router.core.consistent_hash import hash64
from stoker.router.core.policy import Route
from stoker.router.core.prefix import NO_PREFIX, PromptPrefix
from stoker.router.core.replica import Replica
from stoker.router.core.router import Router
from stoker.router.proxy import paths, prompts
from stoker.router.proxy.admin import Admin
from stoker.router.proxy.failures import Formats
from stoker.router.proxy.forward import Forwarder
from stoker.router.proxy.forwarded import Forwarded
from stoker.router.proxy.health import HealthChecker
from stoker.router.proxy.metrics import RouterMetrics
from stoker.router.proxy.owners import Owners
from stoker.router.proxy.prefills import Prefills
from stoker.router.proxy.upstream import UpstreamClient
from stoker.router.settings import RouterSettings
from stoker.server.http.request_context import PLAIN, RequestContext
from stoker.server.metrics.frontend import CONTENT_TYPE, FrontendMetrics
from stoker.server.protocol import Context
from stoker.server.replica_report import ReplicaReport
from stoker.server.settings import ServerSettings
from stoker.server.tenants.accepted_keys import AcceptedKeys

log = get_logger(__name__)
access = get_logger("stoker.router.access")

READY = ("/health", "/health/ready", "/v2/health/ready", "/ping")
LIVE = ("/health/live", "/v2/health/live")
CLIENT_LEFT = 499


class RouterApplication:
    """Answers health, metrics and /router itself, and forwards everything else. `open` starts the health checks."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.router = Router(settings.routing)
        self.metrics = RouterMetrics(self.router)
        context = Context(ModelRepository(), ServerSettings(api_keys=settings.api_keys), FrontendMetrics())
        self.keys = AcceptedKeys(context)
        self._formats = Formats(context)
        self._admin = Admin(self.router, settings, self.add, self.remove)
        self._reader: prompts.PromptReader | None = None
        self._reader_of: ReplicaReport | None = None
        self._reader_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the client, and start the health checks of the replicas. Returns after the first check of each."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        client = UpstreamClient(self._session, self.settings)
        self.checker = HealthChecker(self.router, self.settings, self._session)
        owners = Owners(self.router, client)
        self._owners = owners
        self.prefills = Prefills(self.router, self.metrics, self.checker)
        self._forwarder = Forwarder(self.router, client, self.checker, self._formats, self.metrics, owners, self.prefills)
        self._ticking = asyncio.create_task(self._tick())
        replicas = [self.router.fleet.add(url) for url in self.settings.replicas]
        await asyncio.gather(*map(self.checker.check, replicas))
        for replica in replicas:
            self.checker.watch(replica)
        await self.update_reader()

    async def close(self) -> None:
        """End the health checks and close all connections."""
        self._ticking.cancel()
        await self.checker.close()
        await self._session.close()
        if self._reader is not None:
            await self._reader.close()

    def add(self, url: str) -> Replica:
        """Add a replica, which gets requests after its first health check."""
        replica = self.router.fleet.add(url)
        self.checker.watch(replica)
        log.info("the replica %s was added", url)
        return replica

    async def remove(self, replica: Replica) -> None:
        """Remove a replica. Its requests in flight continue."""
        self.router.remove(replica)
        await self.checker.forget(replica)
        log.info("the replica %s was removed", replica.name)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        http = RequestContext(scope, receive, send, max_body_bytes=self.settings.max_request_bytes)
        path = scope["path"]
        target = scope.get("raw_path", path.encode()).decode("latin-1")
        if http.query:
            target += f"?{http.query.decode('latin-1')}"
        forwarded = Forwarded(http, path, target, b"")
        try:
            await self._handle(forwarded)
        except ConnectionResetError:
            http.disconnected = True
        except asyncio.CancelledError:
            if not http.started:
                await self._refuse(forwarded, UnavailableError("the router is stopping.", cure="Send the request again."))
            raise
        except Exception as error:
            if http.started:
                forwarded.error = forwarded.error or str(error)
                self._log(forwarded)
                raise
            await self._refuse(forwarded, error)
        self._log(forwarded)

    async def _handle(self, forwarded: Forwarded) -> None:
        """Answer or forward one request."""
        http, path = forwarded.http, forwarded.path
        if path.startswith("/router"):
            await self._admin.handle(http, path)
        elif path in LIVE:
            await http.respond(200, content_type=PLAIN)
        elif path in READY:
            await http.respond(200 if self.router.fleet.available else 503, content_type=PLAIN)
        elif path == "/metrics":
            self.keys.authenticate(http.headers)
            await http.respond(200, self.metrics.exposition(), CONTENT_TYPE)
        else:
            self.keys.authenticate(http.headers)
            forwarded.body = await http.body()
            async with http.cancel_on_disconnect():
                await self._forward(forwarded)

    async def _forward(self, forwarded: Forwarded) -> None:
        """Forward a request as the kind of its path demands."""
        http, path = forwarded.http, forwarded.path
        kind = paths.kind_of(http.method, path)
        body = prompts.read_object(forwarded.body) if http.method == "POST" else {}
        object_path = kind.object_path or paths.referenced_object(path, body)
        if object_path:
            owner = await self._owners.find(object_path, http)
            forwarded.route = self._named_route(forwarded, body)
            await self._forwarder.forward(forwarded, only=owner, repeatable=http.method == "GET")
        elif kind.kind is paths.Kind.HOME:
            await self._forwarder.forward(forwarded, only=self._home(path), repeatable=http.method == "GET")
        elif kind.kind is paths.Kind.ALL:
            fleet = self.router.fleet
            await self._forwarder.to_all(forwarded, [replica for replica in fleet if fleet.available >> replica.slot & 1])
        elif kind.kind is paths.Kind.GENERATE:
            forwarded.route = await self._generation_route(forwarded, body)
            await self._forwarder.forward(forwarded)
        else:
            forwarded.route = self._named_route(forwarded, body)
            await self._forwarder.forward(forwarded)

    def _named_route(self, forwarded: Forwarded, body: dict[str, Any]) -> Route:
        """The route of a request without a prompt."""
        headers, fleet = forwarded.http.headers, self.router.fleet
        model = body.get("model")
        if not isinstance(model, str) and forwarded.path.startswith("/v2/models/"):
            model = forwarded.path.split("/")[3]
        known = model if isinstance(model, str) and model in fleet.models() else None
        header = headers.get(self.settings.session_header.encode(), b"").decode("latin-1")
        return Route(
            model=known,
            session=prompts.session_of(body, header)[:512],
            adapter=known if known is not None and len(fleet.models()) > 1 else "",
            tenant=prompts.tenant_of(headers, self.settings.tenant_header)[:512],
        )

    async def _generation_route(self, forwarded: Forwarded, body: dict[str, Any]) -> Route:
        """The route of a request with its prompt."""
        http = forwarded.http
        prefix = await self.prefix(http.method, forwarded.path, list(http.headers.items()), forwarded.body, body)
        return msgspec.structs.replace(self._named_route(forwarded, body), prefix=prefix)

    async def prefix(self, method: str, path: str, headers: list[tuple[bytes, bytes]], data: bytes, body: dict[str, Any]) -> PromptPrefix:
        """The prefix of the prompt in a request whose body is `data`, which contains the JSON object `body`."""
        if self._reader is not None and (found := await self._reader.read(method, path, headers, data)) is not None:
            return found
        return prompts.json_prefix(body, self.tokens_per_block()) if body else NO_PREFIX

    def tokens_per_block(self) -> int:
        """The block size of the replicas; 0 if none has reported one."""
        return next((replica.tokens_per_block for replica in self.router.fleet if replica.tokens_per_block), 0)

    def _home(self, path: str) -> Replica | None:
        """The replica that stores files and batches: the same one in every router with the same replicas."""
        if not (available := self.router.fleet.available):
            return None
        return self.router.fleet.at(self.router.fleet.hashing.pick(available, hash64("files")))

    async def _refuse(self, forwarded: Forwarded, error: BaseException) -> None:
        """Send an error in the format of the path's API."""
        status, body, content_type, headers = self._formats.response(forwarded.path, error)
        forwarded.error = str(error) if isinstance(error, StokerError) else repr(error)
        await forwarded.http.respond(status, body, content_type, headers)

    def _log(self, forwarded: Forwarded) -> None:
        """Count the response, and write a line of JSON to the access log."""
        status = CLIENT_LEFT if forwarded.http.disconnected else forwarded.http.status
        self.metrics.responses.labels(str(status)).inc()
        if not self.settings.access_log or forwarded.path in READY + LIVE:
            return
        line = {
            "method": forwarded.http.method, "path": forwarded.path, "status": status, "request_id": forwarded.http.request_id,
            "replica": forwarded.replica.name if forwarded.replica is not None else None, "attempts": forwarded.num_attempts,
            "prefill": forwarded.prefill.name if forwarded.prefill is not None else None,
            "model": forwarded.route.model, "session": forwarded.route.session or None, "tenant": forwarded.route.tenant or None,
            "prompt_tokens": forwarded.route.prefix.num_tokens, "cached_tokens": forwarded.num_cached, "bytes": forwarded.num_bytes,
            "first_byte_ms": None if forwarded.first_byte_s is None else round(1000 * forwarded.first_byte_s, 2),
            "duration_ms": round(1000 * (time.monotonic() - forwarded.started_s), 2), "error": forwarded.error or None,
        }  # fmt: skip
        access.info("%s", msgspec.json.encode(line).decode())

    async def _tick(self) -> None:
        """Update what depends on the time: pauses of circuit breakers, predictions, and the tokenizer of the replicas."""
        while True:
            await asyncio.sleep(0.2)
            try:
                self.router.fleet.refresh_all(self.router.clock())
                self.router.serve_waiting()
                await self.update_reader()
            except Exception:
                log.exception("the periodic work of the router failed")

    async def update_reader(self) -> None:
        """Tokenize as the first ready replica does. Its models, limits and settings may have changed."""
        if self.settings.tokenizer is None:
            return
        ready = (self.checker.reports.get(replica.name) for replica in self.router.fleet if replica.models)
        report = next((report for report in ready if report is not None and report.info is not None and not report.deployment), None)
        if report is None or (self._reader_of is not None and _same_reading(report, self._reader_of)):
            return
        reader, former = await prompts.PromptReader.create(self.settings.tokenizer, report, self.settings.tokenize_timeout_s), self._reader
        self._reader, self._reader_of = reader, report
        if former is not None:
            await former.close()


def _same_reading(one: ReplicaReport, other: ReplicaReport) -> bool:
    """Whether two replicas tokenize requests in the same way."""
    names = ("models", "tokens_per_block", "protocols", "add_special_tokens", "tool_parser", "reasoning_parser")
    limits = one.info is not None and other.info is not None and one.info.limits == other.info.limits
    return limits and all(getattr(one, name) == getattr(other, name) for name in names)
