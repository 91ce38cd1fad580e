"""OpenTelemetry traces, with a collector that receives OTLP over HTTP and decodes its protobuf."""

from __future__ import annotations

import contextlib
import gzip
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from small_tokenizers import small
from stub_runner import INFO, StubRunner, stub_executor

from stoker.base.errors import ConfigError, DependencyError
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import Shutdown
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredService
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings
from stoker.server.telemetry import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"{PARENT}-01", f"{PARENT}-00"
PROMPT = list(range(10, 110))  # 100 tokens, which the stub's scheduler divides into chunks of 64 and 36


class Collector:
    """The spans that were received, by name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[ExportTraceServiceRequest] = []

    def spans(self) -> dict[str, list[Span]]:
        found: dict[str, list[Span]] = {}
        for request in self.requests:
            for of_resource in request.resource_spans:
                for scope in of_resource.scope_spans:
                    for span in scope.spans:
                        found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield collector
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a real executor on a stub of a device. The end of the block exports the last spans."""
    mailbox = InProcessMailbox(INFO)
    executor = stub_executor(mailbox, StubRunner([40, 41, 42, 43], 2))
    thread = threading.Thread(target=executor.run)
    thread.start()
    tokenizer = Tokenizer(small("byte_level"), {"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token_id": [2, 3]})
    counts, repository = FrontendMetrics(), ModelRepository()
    service = GenerationService("tiny", tokenizer, InProcessClient(mailbox))

    async def load() -> Service:
        return MeteredService(service, counts)

    repository.register("tiny", load, lambda _: service.close())
    await repository.load("tiny")
    context = Context(repository, ServerSettings(**settings), counts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(context)), base_url="http://stoker") as http:
        yield http
    await repository.unload("tiny")
    context.cleanup.close()
    mailbox.put(Shutdown(drain=False))
    thread.join(30)
    assert not thread.is_alive()


def attributes(span: Span) -> dict[str, Any]:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


async def test_the_spans_of_a_request(collector: Collector) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["zzz"]}
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=x", "x-request-id": "mine"}
    async with client(otlp_endpoint=collector.url, trace_sampling=0.0) as http:
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200
    spans = collector.spans()
    assert {name: len(found) for name, found in spans.items()} == {
        "text_completion tiny": 1, "prepare": 1, "queue": 1, "prefill": 2, "decode": 1, "detokenize": 1,
    }  # fmt: skip
    (root,) = spans["text_completion tiny"]
    _, trace_id, span_id, _ = response.headers["traceparent"].split("-")
    assert root.trace_id.hex() == trace_id == PARENT.split("-")[1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2] and root.span_id.hex() == span_id
    assert root.kind == Span.SPAN_KIND_SERVER and root.trace_state == "vendor=x"
    found = attributes(root)
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "stoker", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.response.id": "mine", "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 5, "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ["zzz"], "http.route": "/v1/completions", "http.request.method": "POST",
        "http.response.status_code": 200, "client.address": "127.0.0.1",
    }  # fmt: skip
    assert expected.items() <= found.items() and found["gen_ai.response.time_to_first_chunk"] > 0
    children = [span for name, group in spans.items() if name != "text_completion tiny" for span in group]
    assert {span.parent_span_id for span in children} == {root.span_id} and {span.trace_id for span in children} == {root.trace_id}
    assert len({span.span_id for span in [root, *children]}) == 7
    first, second = sorted(spans["prefill"], key=lambda span: span.start_time_unix_nano)
    assert [attributes(span)["stoker.prefill.tokens"] for span in (first, second)] == [64, 36]
    order = [root, *spans["prepare"], *spans["queue"], first, second, *spans["decode"]]
    starts = [span.start_time_unix_nano for span in order]
    assert starts == sorted(starts) and all(span.start_time_unix_nano <= span.end_time_unix_nano for span in order)
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in children)
    (detokenize,) = spans["detokenize"]
    busy_s = attributes(detokenize)["stoker.detokenize.busy_seconds"]
    assert 0 < busy_s <= (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    resource = {pair.key: pair.value.string_value for pair in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "stoker" and resource["service.version"]


async def test_clients_decide_and_otherwise_the_ratio(collector: Collector) -> None:
    body = {"model": "tiny", "prompt": [10], "max_tokens": 2, "stream": True}
    async with client(otlp_endpoint=collector.url, trace_sampling=0.0) as http:
        response = await http.post("/v1/completions", json=body, headers={"traceparent": NOT_SAMPLED})
        assert response.headers["traceparent"].endswith("-00")
        response = await http.post("/v1/completions", json=body)
        assert "traceparent" not in response.headers
    assert collector.requests == []
    async with client(otlp_endpoint=f"{collector.url}/v1/traces", trace_sampling=1.0) as http:
        response = await http.post("/v1/completions", json=body)
        await http.get("/health")
        await http.post("/v1/completions", json={**body, "max_tokens": -1})
    spans = collector.spans()
    assert set(spans) == {"text_completion tiny", "prepare", "queue", "prefill", "decode", "detokenize", "POST /v1/completions"}
    (root,) = spans["text_completion tiny"]
    assert root.trace_id.hex() == response.headers["traceparent"].split("-")[1] and not root.parent_span_id
    (refused,) = spans["POST /v1/completions"]
    assert attributes(refused)["http.response.status_code"] == 400 and refused.trace_id != root.trace_id


async def test_a_fraction_of_the_requests_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = tracing.Tracing(ServerSettings(otlp_endpoint="http://127.0.0.1:9", trace_sampling=0.25))
    draws = iter([0.1, 0.3, 0.24, 0.9])
    monkeypatch.setattr(tracing.random, "random", lambda: next(draws))
    assert [traces.sample(None) is not None for _ in range(4)] == [True, False, True, False]
    traces.close()


async def test_a_collector_that_does_not_answer_delays_nothing() -> None:
    async with client(otlp_endpoint="http://127.0.0.1:9") as http:
        assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": [10], "max_tokens": 2})).status_code == 200


def test_without_traces_nothing_is_imported() -> None:
    code = "import sys, stoker.server.processes.frontend; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_invalid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({"otlp_endpoint": "localhost:4318"}, {"trace_sampling": 1.5}, {"trace_sampling": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            ServerSettings(**settings)
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"stoker\[otel\]"):
        tracing.check_packages()
