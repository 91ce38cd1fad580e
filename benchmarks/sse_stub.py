"""Measures the tokens per second that one frontend process streams over SSE, with a service that emits all tokens immediately.

    python benchmarks/sse_stub.py [--streams 64] [--tokens 1000] [--group 1] [--protocol chat] [--json]

The service wakes a stream for every `group` tokens. The most expensive case is 1: a send per token and stream. The client is another
process that reads raw bytes and counts events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import selectors
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any

import uvloop

from stoker.base.config import Limits
from stoker.base.profile_query import ProfileResult
from stoker.base.types import Delta, FinishReason, GenerationRequest, Usage
from stoker.cli.benchmark.results import provenance
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Completion, Service
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.live_state import LiveState
from stoker.runtime.request import ExecutorStats
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredService
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "kserve": "/v2/models/ensemble/generate_stream",
    "sagemaker": "/invocations",
    "truss": "/v1/models/model:predict",
}
EVENTS = {"truss": b" token\r\n"}  # plain text: one token per chunk


class InstantService(Service):
    """Emits all tokens immediately, with one iteration of the event loop per wake-up."""

    model_name = "stub"

    def __init__(self, group: int) -> None:
        self._group = group
        limits = Limits(max_output_len=1 << 20, max_input_len=1 << 10)
        self._info = ExecutorInfo(
            limits=limits, max_seq_len=limits.max_seq_len, vocab_size=256, device="cpu", kv_cache_tokens=1, model="stub"
        )

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[list[Delta], None]:
        total, group = request.params.max_tokens, self._group
        yield [Delta(0, " token", [1], usage=Usage(3))]
        for _ in range((total - 2) // group):
            await asyncio.sleep(0)
            yield [Delta(0, " token" * group, [1] * group)]
        yield [Delta(0, " token", [1], finish_reason=FinishReason.LENGTH, usage=Usage(3, total))]

    async def complete(self, request: GenerationRequest) -> Completion:
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    async def render_chat(self, messages: list[dict[str, Any]], **template_values: Any) -> str:
        return messages[0]["content"]

    async def stats(self) -> ExecutorStats:
        return ExecutorStats()

    async def profile(self, num_steps: int, time_s: float) -> ProfileResult:
        return ProfileResult(error="the stub has no steps")

    async def live(self, *, detail: bool = False, first_step: int | None = None, log_after_s: float | None = None) -> LiveState:
        return LiveState(await self.stats(), 0.0, 0.0, [], [], [], [], [], 0, [], {})

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def max_seq_len(self) -> int:
        return self._info.max_seq_len

    @property
    def ready(self) -> bool:
        return True


def serve(pipe: multiprocessing.connection.Connection, group: int) -> None:
    uvloop.run(_serve(pipe, group))


async def _serve(pipe: multiprocessing.connection.Connection, group: int) -> None:
    counts, repository = FrontendMetrics(), ModelRepository()

    async def load() -> Service:
        return MeteredService(InstantService(group), counts)

    repository.register("stub", load, lambda service: asyncio.sleep(0))
    await repository.load("stub")
    context = Context(repository, ServerSettings(), counts)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = HttpServer(http_config(make_app(context), context.settings))
    pipe.send(listener.getsockname()[1])
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: setattr(server, "should_exit", True))
    await server.serve(sockets=[listener])
    pipe.send(time.process_time())


def request_bytes(protocol: str, tokens: int) -> bytes:
    fields: dict[str, Any] = {"max_tokens": tokens, "stream": True}
    if protocol == "kserve":
        fields["text_input"] = "hi"
    elif protocol == "sagemaker":
        fields = {"inputs": "hi", "stream": True, "parameters": {"max_new_tokens": tokens, "output_formatter": "sse"}}
    else:
        fields |= {"messages": [{"role": "user", "content": "hi"}]} if protocol == "chat" else {"prompt": "hi"}
    body = json.dumps(fields).encode()
    headers = f"host: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST {PATHS[protocol]} HTTP/1.1\r\n{headers}\r\n\r\n"
    return head.encode() + body


def read_all(port: int, request: bytes, num_streams: int, event: bytes) -> tuple[int, float, list[float]]:
    """Events of all streams, seconds from the first request to the last byte, and seconds to the first event of each stream.

    Every event contains the bytes `event` once.
    """
    selector = selectors.DefaultSelector()
    started = time.perf_counter()
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(request)
        selector.register(stream, selectors.EVENT_READ, [time.perf_counter(), None])
    events, firsts = 0, []
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            found = data.count(event)
            events += found
            if found and key.data[1] is None:
                key.data[1] = time.perf_counter() - key.data[0]
                firsts.append(key.data[1])
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return events, time.perf_counter() - started, sorted(firsts)


def measure(protocol: str, num_streams: int, tokens: int, group: int) -> dict[str, Any]:
    pipe, server_pipe = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(server_pipe, group))
    server.start()
    port = pipe.recv()
    event = EVENTS.get(protocol, b"data: {")
    read_all(port, request_bytes(protocol, 50), 4, event)
    best: dict[str, Any] = {}
    for _ in range(3):
        events, elapsed_s, firsts = read_all(port, request_bytes(protocol, tokens), num_streams, event)
        assert events >= num_streams * (tokens // group), f"{events} events"
        rate = num_streams * tokens / elapsed_s
        if rate > best.get("tokens_per_s", 0):
            best = {
                "tokens_per_s": round(rate),
                "events_per_s": round(events / elapsed_s),
                "ttft_p50_ms": round(firsts[len(firsts) // 2] * 1e3, 2),
            }
    pipe.send("stop")
    cpu_s = pipe.recv()
    server.join()
    return {
        "protocol": protocol,
        "streams": num_streams,
        "tokens": tokens,
        "tokens_per_wake_up": group,
        **best,
        "server_cpu_s": round(cpu_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--protocol", choices=[*PATHS, "all"], default="all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    protocols = list(PATHS) if args.protocol == "all" else [args.protocol]
    results = [measure(protocol, args.streams, args.tokens, args.group) for protocol in protocols]
    if args.json:
        print(json.dumps({**provenance(), "results": results}, indent=1))
    else:
        for result in results:
            print("  ".join(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
