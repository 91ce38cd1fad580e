"""Measures what logs, metrics and traces cost a frontend process that streams the tokens of the stub service of sse_stub.py.

    PYTHONPATH=src python benchmarks/observability_cost.py [--rounds 15] [--output FILE.json]

Each variant is a server process of its own. A round sends the same requests to every variant, in an order that changes from round to round,
so that other work on the machine affects all of them. The cost of a variant is the median over rounds of its CPU time per token ÷ that of
the variant without all three in the same round. CPU time is that of the whole process, with the threads that export spans.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import random
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from sse_stub import InstantService, read_all, request_bytes

from stoker.base import logging
from stoker.base.types import Delta, GenerationRequest, Timings
from stoker.cli.benchmark.results import provenance
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.runtime.request import SequenceOutput, TokenRequest
from stoker.runtime.transport.streams import OutputStream, StreamingClient
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredClient, MeteredService
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

STREAMS = 64
# Variant: whether it has metrics, lines of requests, and traces of 1 % of the requests.
VARIANTS = {
    "none": (False, False, False),
    "metrics": (True, False, False),
    "metrics and logs": (True, True, False),
    "metrics, logs and traces": (True, True, True),
}
REQUESTS = {1000: 1, 128: 8}  # tokens of a request: requests of each stream in a round


class TimedInstantService(InstantService):
    """The stub with timings in the last delta, as the actual service has. With `client`, the times of tokens are measured as those of an
    executor are: once for the tokens of all streams that one message contains."""

    def __init__(self, client: StreamingClient | None) -> None:
        super().__init__(1)
        self._client = client
        self._outputs: list[SequenceOutput] = []

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        client, output = self._client, SequenceOutput(request.request_id, 0, [1])
        if client is not None:
            client._streams[request.request_id] = OutputStream(TokenRequest(request_id="", prompt_ids=[], params=request.params), "")
        async for deltas in super().stream(request):
            if deltas[-1].finish_reason is not None:
                deltas[-1].timings = Timings(0.001, 0.01, 0.5, 2000.0, 0.001)
            if client is not None:
                self._outputs.append(output)
                if len(self._outputs) >= len(client._streams):
                    assert client.latencies is not None
                    client._measure(self._outputs, client.latencies)
                    self._outputs = []
            yield deltas
        if client is not None:
            del client._streams[request.request_id]


class NoTransport(StreamingClient):
    """A client without an executor."""

    alive = True

    def _transmit(self, message: Any) -> None: ...
    async def close(self) -> None: ...


def service(counts: FrontendMetrics, *, metered: bool) -> Service:
    """The stub service, with or without everything that counts and measures."""
    if not metered:
        return TimedInstantService(None)
    client = NoTransport(InstantService(1).info, "stub")
    MeteredClient(client, "stub", counts)  # sets the client's latencies
    return MeteredService(TimedInstantService(client), counts)


def serve(pipe: multiprocessing.connection.Connection, variant: str, folder: str, collector: str) -> None:
    uvloop.run(_serve(pipe, variant, Path(folder), collector))


async def _serve(pipe: multiprocessing.connection.Connection, variant: str, folder: Path, collector: str) -> None:
    has_metrics, has_logs, has_traces = VARIANTS[variant]
    logging.apply(logging.LogConfig(file=str(folder / "server.log")))
    counts, repository = FrontendMetrics(), ModelRepository()

    async def load() -> Service:
        return service(counts, metered=has_metrics)

    repository.register("stub", load, lambda service: asyncio.sleep(0))
    await repository.load("stub")
    traces: dict[str, Any] = {"otlp_endpoint": collector, "trace_sampling": 0.01} if has_traces else {}
    context = Context(repository, ServerSettings(log_requests="line" if has_logs else "none", **traces), counts)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = HttpServer(http_config(make_app(context), context.settings))
    pipe.send(listener.getsockname()[1])
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: setattr(server, "should_exit", True))
    await server.serve(sockets=[listener])
    context.cleanup.close()


class Collector(BaseHTTPRequestHandler):
    """Accepts spans and drops them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def cpu_s(pid: int) -> float:
    """CPU time of a process with all of its threads, in seconds."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def measure(rounds: int) -> list[dict[str, Any]]:
    """The results of each length of requests and each variant."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with contextlib.ExitStack() as stack:
        servers = {}
        for variant in VARIANTS:
            pipe, server_pipe = multiprocessing.Pipe()
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            arguments = (server_pipe, variant, folder, f"http://127.0.0.1:{collector.server_port}")
            process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
            process.start()
            stack.callback(process.join)
            stack.callback(pipe.send, "stop")
            servers[variant] = (process.pid, pipe.recv())
        for _, port in servers.values():
            read_all(port, request_bytes("chat", 50), 4, b"data: {")
        results = [result for tokens in REQUESTS for result in measure_length(servers, tokens, rounds)]
    collector.shutdown()
    return results


def measure_length(servers: dict[str, Any], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The results of all variants for requests of this number of tokens."""
    cpu_us: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    repetitions = REQUESTS[tokens]
    for _ in range(rounds):
        for variant in random.sample(list(VARIANTS), len(VARIANTS)):
            pid, port = servers[variant]
            before = cpu_s(pid)
            num_tokens, elapsed_s = STREAMS * tokens * repetitions, 0.0
            for _ in range(repetitions):
                events, seconds, _ = read_all(port, request_bytes("chat", tokens), STREAMS, b"data: {")
                assert events >= STREAMS * tokens, f"{events} events"
                elapsed_s += seconds
            cpu_us[variant].append((cpu_s(pid) - before) / num_tokens * 1e6)
            rates[variant].append(num_tokens / elapsed_s)
    return [
        {
            "tokens_per_request": tokens,
            "variant": variant,
            "cpu_us_per_token": round(statistics.median(cpu_us[variant]), 3),
            "cost_percent": round(100 * statistics.median(b / a - 1 for a, b in zip(cpu_us["none"], cpu_us[variant], strict=True)), 2),
            "tokens_per_s": round(statistics.median(rates[variant])),
        }
        for variant in VARIANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = {**provenance(), "streams": STREAMS, "rounds": arguments.rounds, "results": measure(arguments.rounds)}
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
