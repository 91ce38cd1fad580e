"""The ASGI application: routes each request to a protocol, and writes errors in the format of that protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from stoker.base.errors import StokerError, UnavailableError
from stoker.base.logging import get_logger
from stoker.runtime.transfer.ticket import HEADER
from stoker.server.documentation.protocol import Documentation
from stoker.server.errors import RouteError, describe
from stoker.server.http.origin import check_site
from stoker.server.http.request_context import RequestContext
from stoker.server.http.routing import Routes
from stoker.server.prompt_export import handle_with_ticket
from stoker.server.protocol import Context, Endpoint, Protocol
from stoker.server.protocols.registry import PROTOCOLS
from stoker.server.settings import ServerSettings
from stoker.server.telemetry.record import CURRENT, RequestRecord
from stoker.server.tenants.accepted_keys import AcceptedKeys
from stoker.server.tenants.tenants import act_as

log = get_logger(__name__)

METRICS = "/metrics"
POLLED = ("health", "console")  # protocols whose requests have lines at the level DEBUG

LIMIT_HEADERS = tuple(f"x-ratelimit-{name}-{kind}" for name in ("limit", "remaining", "reset") for kind in ("requests", "tokens"))


def make_app(context: Context) -> Any:
    """An ASGI application with the protocols that the settings name, or all, and the routes of health and documentation."""
    protocols: dict[str, Protocol] = {name: PROTOCOLS.get(name)(context) for name in served_protocols(context.settings)}
    if not any("/" in protocol.prefixes for protocol in protocols.values()):  # a protocol that defines every path
        protocols["documentation"] = Documentation(context, tuple(protocols.values()))
    app: Any = Application(context, protocols)
    if origins := context.settings.cors_origins:
        exposed = ["x-request-id", "traceparent", "server-timing", "retry-after", *LIMIT_HEADERS]
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    return app


def served_protocols(settings: ServerSettings) -> list[str]:
    """The names of the protocols that a server with these settings has, in the order of their routes."""
    names = dict.fromkeys(("health", "debug", *(settings.protocols or PROTOCOLS)))
    if settings.console is not None:
        names.pop("console", None)
    return [*names, "console"] if settings.console else list(names)


class Application:
    """Routes requests to endpoints. An exception of a handler becomes an error response in the format of the path's protocol."""

    def __init__(self, context: Context, protocols: dict[str, Protocol]) -> None:
        self._context = context
        self._protocols = list(protocols.values())
        self._telemetry = context.telemetry()
        self._keys = AcceptedKeys.of(context)
        endpoints = [(name, protocol, endpoint) for name, protocol in protocols.items() for endpoint in protocol.endpoints()]
        self._routes = Routes([(endpoint.method, endpoint.path, (name, protocol, endpoint)) for name, protocol, endpoint in endpoints])

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """The ASGI interface. WebSocket connections are closed."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        http = RequestContext(scope, receive, send, max_body_bytes=self._context.settings.max_request_bytes)
        try:
            self._check_port(scope)
            (name, protocol, endpoint), http.path = self._routes.find(scope["method"], scope["path"])
        except StokerError as error:
            record = self._open_record(http, scope, "-", "-")
            await self._refuse(http, self._owner(scope["path"]), error)
            self._context.metrics.count_response("other", http.status)
            self._telemetry.close(record, http.status)
            return
        record = self._open_record(http, scope, name, endpoint.path)
        CURRENT.set(record)
        try:
            await self.handle(protocol, endpoint, http)
        finally:
            status = 499 if http.disconnected else http.status
            self._telemetry.close(record, status, probe=endpoint.open or name in POLLED)

    def _open_record(self, http: RequestContext, scope: dict[str, Any], protocol: str, route: str) -> RequestRecord:
        """Open the record of a request, from which its response gets headers."""
        client = (scope.get("client") or ("-",))[0]
        http.record = self._telemetry.open(
            http.headers, request_id=http.request_id, client=client, protocol=protocol, method=http.method, route=route
        )
        return http.record

    def _check_port(self, scope: dict[str, Any]) -> None:
        """The separate metrics port, if there is one, serves only metrics and health. Raises RouteError for other paths."""
        port = self._context.settings.metrics_port
        if port and (scope.get("server") or ("", 0))[1] == port and not scope["path"].startswith((METRICS, "/health")):
            raise RouteError(scope["path"])

    def _authenticate(self, http: RequestContext) -> None:
        """Find the key of a request. A POST counts towards its limit. Raises AuthenticationError and RateLimitError."""
        if not self._keys.required:
            return
        tenant = self._keys.authenticate(http.headers)
        act_as(tenant)  # for this task, which handles the request
        if tenant is not None:
            http.limit_headers = tenant.headers
            if http.record is not None:
                http.record.key = tenant.name
            if http.method == "POST":
                tenant.count_request()

    async def handle(self, protocol: Protocol, endpoint: Endpoint, http: RequestContext) -> None:
        """Run the endpoint's handler and count its response. A client that has disconnected counts as status 499."""
        try:
            check_site(http, self._context.settings, has_keys=self._keys.required)
            if not endpoint.open:
                self._authenticate(http)
            if HEADER in http.headers:
                await handle_with_ticket(endpoint, http, self._context.settings.max_request_bytes)
            else:
                await endpoint.handler(http)
        except ConnectionResetError:
            http.disconnected = True
        except asyncio.CancelledError:  # the drain time is over, which was logged; a stream that has started is cut
            if not http.started:
                await self._refuse(http, protocol, UnavailableError("The server is stopping.", cure="Send the request again."))
            raise
        except Exception as error:
            if http.started:
                known = isinstance(error, StokerError)
                log.error("%s failed after its response had started: %r", endpoint.path, error, exc_info=None if known else error)
                raise
            await self._refuse(http, protocol, error)
        self._context.metrics.count_response(endpoint.path, 499 if http.disconnected else http.status)

    async def _refuse(self, http: RequestContext, protocol: Protocol, error: BaseException) -> None:
        """Send the error response in the protocol's format. An error of an unknown type becomes status 500."""
        failure = describe(error)
        if http.record is not None:
            http.record.error = failure.code
        await http.respond(failure.status, protocol.failure_body(failure), protocol.failure_type, failure.headers)

    def _owner(self, path: str) -> Protocol:
        """The protocol whose prefixes match `path`, which writes the errors of unknown routes. The first protocol if none matches."""
        return next((protocol for protocol in self._protocols if path.startswith(protocol.prefixes)), self._protocols[0])
