"""OpenTelemetry traces: spans of sampled requests, exported over OTLP.

A request is sampled when it begins: as its client decided if it has a `traceparent`, otherwise with the probability of the settings. Its
spans are created from its record when it has ended, so a request that is not sampled costs one random number. The packages of
OpenTelemetry are imported only if traces are exported.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from importlib.metadata import version
from typing import Any

from stoker.base.errors import DependencyError
from stoker.server.settings import ServerSettings
from stoker.server.telemetry.record import Generation, RequestRecord
from stoker.server.telemetry.span_attributes import (
    detokenize_attributes,
    generation_attributes,
    is_failure,
    prefill_attributes,
    request_attributes,
    span_name,
)
from stoker.server.telemetry.trace_context import TraceContext, new_trace

EXPORT_TIMEOUT_S = 5.0  # of one batch of spans
END_S = 3.0  # limit for exporting the last spans when the server stops
TRACES_PATH = "/v1/traces"


def check_packages() -> None:
    """Raise DependencyError if the packages that export traces are not installed."""
    names = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp.proto.http")
    try:
        found = all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        found = False
    if not found:
        raise DependencyError("opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http", "exporting traces", "otel")


class Tracing:
    """Samples requests, and exports the spans of sampled ones to the collector of the settings. Use it from one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        assert settings.otlp_endpoint is not None
        check_packages()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class GivenIds(RandomIdGenerator):
            """Returns the ids of a record for its first span, and random ids for the others."""

            trace_id = span_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

            def generate_span_id(self) -> int:
                span_id, self.span_id = self.span_id, 0
                return span_id or super().generate_span_id()

        self._ratio = settings.trace_sampling
        self._ids = GivenIds()
        resource = Resource.create({"service.version": version("stoker")})  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "stoker"}))
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=traces_url(settings.otlp_endpoint), timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("stoker", version("stoker"))

    def sample(self, context: TraceContext | None) -> TraceContext | None:
        """The context of a request that begins. `context` is that of its client, which decided whether it is sampled."""
        if context is not None:
            return context
        return new_trace(sampled=True) if random.random() < self._ratio else None

    def export(self, record: RequestRecord) -> None:
        """Create the spans of a sampled request that has ended. A thread sends them to the collector."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        assert record.trace is not None
        clock = _Clock()
        self._ids.trace_id, self._ids.span_id = int(record.trace.trace_id, 16), int(record.trace.span_id, 16)
        span = self._tracer.start_span(
            span_name(record),
            context=_parent(record.trace),
            kind=SpanKind.SERVER,
            start_time=clock.ns(record.started),
            attributes=request_attributes(record),
        )
        context = set_span_in_context(span)
        for generation in record.generations:
            self._export_generation(generation, context, clock)
        if is_failure(record):
            span.set_status(Status(StatusCode.ERROR))
        span.end(clock.ns(time.monotonic()))

    def close(self) -> None:
        """Export the last spans for at most END_S, and end the thread."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(END_S)

    def _export_generation(self, generation: Generation, context: Any, clock: _Clock) -> None:
        """Create the spans of the phases of one generation, as children of the request's span."""
        timings = generation.timings
        if timings is None:  # it was refused, or cancelled before its last token
            return
        submitted = generation.started + timings.prepare_s
        admitted = submitted + timings.queue_s
        last = generation.started + timings.total_s
        self._add("prepare", context, clock, generation.started, submitted)
        self._add("queue", context, clock, submitted, admitted)
        for chunk in generation.chunks:
            self._add("prefill", context, clock, chunk.started, chunk.ended, prefill_attributes(chunk))
        if generation.first is not None:
            first = generation.started + timings.time_to_first_token_s
            self._add("decode", context, clock, first, last, generation_attributes(generation))
            self._add("detokenize", context, clock, first, last, detokenize_attributes(timings))

    def _add(self, name: str, context: Any, clock: _Clock, started: float, ended: float, attributes: dict[str, Any] | None = None) -> None:
        """Create a span between two times of time.monotonic()."""
        self._tracer.start_span(name, context=context, start_time=clock.ns(started), attributes=attributes).end(clock.ns(ended))


class _Clock:
    """Converts times of time.monotonic() to nanoseconds since 1970, with the present difference of the two clocks."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, seconds: float) -> int:
        """The Unix time in nanoseconds."""
        return int(seconds * 1e9) + self._offset


def _parent(trace: TraceContext) -> Any:
    """The context of the client's span; an empty one if the client sent none."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if not trace.parent_id:
        return Context()
    state = TraceState.from_header([trace.state] if trace.state else [])
    flags = TraceFlags(TraceFlags.SAMPLED)
    context = SpanContext(int(trace.trace_id, 16), int(trace.parent_id, 16), is_remote=True, trace_flags=flags, trace_state=state)
    return set_span_in_context(NonRecordingSpan(context), Context())


def traces_url(endpoint: str) -> str:
    """The URL to which spans are sent: the endpoint itself if it names the path of traces, otherwise that path below it."""
    return endpoint if endpoint.rstrip("/").endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH
