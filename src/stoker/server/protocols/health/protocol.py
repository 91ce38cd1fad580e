"""The server's own endpoints: liveness, readiness, version and metrics."""

from __future__ import annotations

import asyncio
import importlib.metadata

import msgspec

from stoker.server.errors import Failure
from stoker.server.http.request_context import PLAIN, RequestContext
from stoker.server.metrics.frontend import CONTENT_TYPE
from stoker.server.metrics.names import with_names
from stoker.server.operation import OBJECT, STRING, TEXT_TYPE, Operation, list_of, record
from stoker.server.protocol import Endpoint, Protocol
from stoker.server.replica_report import make_report

_STATE = record({"model": STRING, "state": STRING, "reason": STRING})
_NOT_READY = record({"error": STRING, "models?": list_of(_STATE)}, "NotReady")


class Health(Protocol):
    """/health/live: the process is running. /health, /health/ready: every model is ready. /health/replica: the report for routers.
    /metrics: Prometheus' text format.
    """

    prefixes = ("/health", "/metrics", "/version")
    operations = {
        ("GET", "/health"): Operation(summary="Readiness: status 200 or 503", error=_NOT_READY),
        ("GET", "/health/ready"): Operation(summary="Readiness: status 200 or 503", error=_NOT_READY),
        ("GET", "/health/live"): Operation(summary="Liveness: status 200"),
        ("GET", "/health/replica"): Operation(summary="Models, load and properties of this server, for routers", response=OBJECT),
        ("GET", "/version"): Operation(summary="The version of Stoker", response=record({"version": STRING})),
        ("GET", "/metrics"): Operation(summary="Metrics in the text format of Prometheus", response=STRING, response_type=TEXT_TYPE),
    }
    error_schema = record({"error": STRING}, "Error")

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/health", self.ready, open=True),
            Endpoint("GET", "/health/ready", self.ready, open=True),
            Endpoint("GET", "/health/live", self.live, open=True),
            Endpoint("GET", "/health/replica", self.replica),
            Endpoint("GET", "/version", self.version, open=True),
            Endpoint("GET", "/metrics", self.metrics),
        ]

    async def live(self, http: RequestContext) -> None:
        """GET /health/live: status 200."""
        await http.respond(200, content_type=PLAIN)

    async def ready(self, http: RequestContext) -> None:
        """Status 200 if every model is ready; otherwise 503 with the state of each other model and the reason."""
        repository = self.context.repository
        if repository.ready:
            await http.respond(200, content_type=PLAIN)
            return
        states = [{"model": m.name, "state": m.state, "reason": m.why_not_ready} for m in repository.models() if not m.ready]
        await http.respond(503, msgspec.json.encode({"error": "not ready", "models": states}))

    async def replica(self, http: RequestContext) -> None:
        """GET /health/replica: the report of this server for routers."""
        context = self.context
        report = await make_report(context.repository, context.settings, context.metrics.statistics)
        await http.respond(200, msgspec.json.encode(report))

    async def version(self, http: RequestContext) -> None:
        """GET /version: the version of Stoker."""
        await http.respond(200, msgspec.json.encode({"version": importlib.metadata.version("stoker")}))

    async def metrics(self, http: RequestContext) -> None:
        """GET /metrics: Prometheus' text format."""
        exposition = await self.context.metrics.exposition(self.context.repository)
        body = await asyncio.to_thread(with_names, exposition, self.context.settings.metric_names)
        await http.respond(200, body, CONTENT_TYPE)

    def failure_body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})
