"""Opens the record of each request, and writes its line of the log and its spans when the request has ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from stoker.server.settings import ServerSettings
from stoker.server.telemetry.access_log import log_request
from stoker.server.telemetry.record import RequestRecord
from stoker.server.telemetry.trace_context import parse_parent

PARENT, STATE, RETURN_TIMINGS = b"traceparent", b"tracestate", b"x-return-timings"


class Telemetry:
    """The log and the traces of the requests of this process. Raises DependencyError if traces are exported without their packages."""

    def __init__(self, settings: ServerSettings) -> None:
        self._logs_requests = settings.log_requests != "none"
        self._logs_contents = settings.log_requests == "contents"
        self._tracing = None
        if settings.otlp_endpoint is not None:
            from stoker.server.telemetry.tracing import Tracing

            self._tracing = Tracing(settings)

    def open(
        self, headers: Mapping[bytes, bytes], *, request_id: str, client: str, protocol: str, method: str, route: str
    ) -> RequestRecord:
        """The record of a request that begins. `headers` are those of HTTP, or the metadata of gRPC, with names in lower case."""
        record = RequestRecord(request_id, client=client, protocol=protocol, method=method, route=route)
        record.contents = self._logs_contents
        if (parent := headers.get(PARENT)) is not None:
            record.trace = parse_parent(parent, headers.get(STATE))
        if self._tracing is not None:
            record.trace = self._tracing.sample(record.trace)
            record.measured = record.trace is not None and record.trace.sampled
        if RETURN_TIMINGS in headers:
            record.returns_timings = headers[RETURN_TIMINGS].lower() in (b"1", b"true")
        return record

    def close(self, record: RequestRecord, status: int, *, probe: bool = False) -> None:
        """The request has ended with this HTTP status. The lines of probes (health, metrics and the console) have the level DEBUG."""
        record.status = status
        for callback in record.on_close:
            callback()
        if self._logs_requests:
            log_request(record, level=logging.DEBUG if probe else logging.INFO)
        if self._tracing is not None and not probe and record.trace is not None and record.trace.sampled:
            self._tracing.export(record)

    def shut_down(self) -> None:
        """Export the last spans."""
        if self._tracing is not None:
            self._tracing.close()
