"""Measures the cost of each protocol: tokens per second compared with the same engine in this process, and the time HTTP adds to the first
token.

    python benchmarks/endpoints.py [--engine DIR] [--streams 16 64] [--tokens 48] [--rounds 3] [--output FILE.json]
    python benchmarks/endpoints.py --only ttft

The default engine is that of the demo (`stoker demo --engine`). A round measures the engine in-process and through each protocol in turn,
so that other work on the machine affects all of them. The ratio of a protocol is the median over rounds of its rate ÷ the in-process rate.
Tokens are counted by the server. The first token is timed with a stub executor behind the real transport, which has a step every STEP_S
for 64 open streams: once from a client of the same executor in this process, and once over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import triton_compare  # noqa: E402

from stoker.api.llm import LLM  # noqa: E402
from stoker.base.types import GenerationRequest, SamplingParams  # noqa: E402
from stoker.cli.benchmark.results import provenance  # noqa: E402
from stoker.cli.server_process import running_server  # noqa: E402
from stoker.frontend.generation import GenerationService  # noqa: E402
from stoker.frontend.tokenizer import Tokenizer  # noqa: E402
from stoker.runtime.transport.zmq_client import ZmqExecutorClient  # noqa: E402

KV_CACHE_TOKENS = 16384
STEP_S = 0.01
TTFT_STREAMS = 64
TTFT_PROBES = 300
COUNTED = re.compile(r"^stoker_output_tokens_total\{.*\} (\S+)$", re.MULTILINE)


def prompts(num_streams: int) -> list[str]:
    return [f"Story number {i} begins on a cold morning, when" for i in range(num_streams)]


def post(path: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


HTTP_REQUESTS: dict[str, Callable[[str, int], bytes]] = {
    "openai": lambda text, n: post(
        "/v1/completions", {"prompt": text, "max_tokens": n, "stream": True, "ignore_eos": True, "temperature": 0}
    ),
    "kserve_http": lambda text, n: post(
        "/v2/models/ensemble/generate_stream", {"text_input": text, "max_tokens": n, "stream": True, "end_id": -1}
    ),
    "sagemaker": lambda text, n: post(
        "/invocations", {"inputs": text, "parameters": {"max_new_tokens": n, "do_sample": False}, "stream": True}
    ),
    "truss": lambda text, n: post("/v1/models/model:predict", {"prompt": text, "max_tokens": n, "stream": True}),
}


def http_streams(port: int, requests: list[bytes]) -> None:
    """Send all requests at once over raw sockets and read the responses. Raises AssertionError for a response that is not 200."""
    selector = selectors.DefaultSelector()
    for request in requests:
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(request)
        selector.register(stream, selectors.EVENT_READ, [])
    while selector.get_map():
        for key, _ in selector.select(120):
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            key.data.append(data)
            if not data:
                response = b"".join(key.data)
                assert response.startswith(b"HTTP/1.1 200") and b'"error"' not in response, response[:2000]
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def grpc_streams(port: int, texts: list[str], tokens: int) -> None:
    """Run all streams at once in one event loop, with a channel each."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    async def one(text: str) -> None:
        request = service_pb2.ModelInferRequest(model_name="ensemble")
        values = {
            "text_input": ("BYTES", "bytes_contents", text.encode()),
            "max_tokens": ("INT32", "int_contents", tokens),
            "end_id": ("INT32", "int_contents", -1),
            "stream": ("BOOL", "bool_contents", True),
        }
        for name, (kind, field, value) in values.items():
            tensor = request.inputs.add(name=name, datatype=kind, shape=[1, 1])
            getattr(tensor.contents, field).append(value)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            async for response in service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request])):
                assert not response.error_message, response.error_message

    async def run_all() -> None:
        await asyncio.gather(*map(one, texts))

    asyncio.run(run_all())


def count_tokens(url: str) -> float:
    """Output tokens that the server has counted."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(float(value) for value in COUNTED.findall(text))


def throughput(engine: Path, num_streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second in-process, and through each protocol with its ratio."""
    texts, grpc_port = prompts(num_streams), triton_compare.free_port()
    rates: dict[str, list[float]] = {}
    options = ["--grpc-port", str(grpc_port), "--kv-cache-tokens", str(KV_CACHE_TOKENS), "--model-name", "demo"]
    with LLM(engine, kv_cache_tokens=KV_CACHE_TOKENS) as llm, running_server(engine, options) as url:
        port = int(url.rpartition(":")[2])
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)

        def in_process() -> float:
            started = time.perf_counter()
            tokens_out = sum(len(choice.token_ids) for completion in llm.generate(texts, params) for choice in completion.choices)
            return tokens_out / (time.perf_counter() - started)

        def through(run: Callable[[], None]) -> float:
            before, started = count_tokens(url), time.perf_counter()
            run()
            elapsed = time.perf_counter() - started
            return (count_tokens(url) - before) / elapsed

        protocols: dict[str, Callable[[], None]] = {
            name: lambda request=request: http_streams(port, [request(text, tokens) for text in texts])  # type: ignore[misc]
            for name, request in HTTP_REQUESTS.items()
        }
        protocols["grpc"] = lambda: grpc_streams(grpc_port, texts, tokens)
        for run in (in_process, *protocols.values()):  # warm up, and fill both prefix indexes
            run()
        for _ in range(rounds):
            rates.setdefault("in_process", []).append(in_process())
            for name, run in protocols.items():
                rates.setdefault(name, []).append(through(run))
    base = rates["in_process"]
    found: dict[str, Any] = {"streams": num_streams, "tokens": tokens, "in_process_tokens_per_s": round(statistics.median(base), 1)}
    for name in protocols:
        ratios = [rate / other for rate, other in zip(rates[name], base, strict=True)]
        found[name] = {"tokens_per_s": round(statistics.median(rates[name]), 1), "ratio": round(statistics.median(ratios), 3)}
    return found


def http_first_ms(port: int) -> list[float]:
    """Milliseconds to the first event of single requests, while TTFT_STREAMS - 1 others run."""
    request = HTTP_REQUESTS["openai"]("hello", 1 << 14)
    busy = [socket.create_connection(("127.0.0.1", port)) for _ in range(TTFT_STREAMS - 1)]
    reader = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--drain", *(str(stream.fileno()) for stream in busy)],
        pass_fds=[stream.fileno() for stream in busy],
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None
    reader.stdout.readline()
    for stream in busy:
        stream.sendall(request)
    time.sleep(0.5)
    times = []
    probe = HTTP_REQUESTS["openai"]("hello", 2)
    for i in range(TTFT_PROBES):
        time.sleep(0.002 + STEP_S * (i % 7) / 7)  # not synchronous with the steps of the executor
        with socket.create_connection(("127.0.0.1", port)) as stream:
            started = time.perf_counter()
            stream.sendall(probe)
            data = b""
            while b"data: {" not in data:
                data += stream.recv(1 << 16)
            times.append((time.perf_counter() - started) * 1e3)
    reader.kill()
    reader.wait()
    for stream in busy:
        stream.close()
    time.sleep(0.3)
    return times


async def in_process_first_ms(service: GenerationService) -> list[float]:
    """The same with a client of the executor in this process."""

    async def run(number: int, tokens: int) -> float:
        request = GenerationRequest(request_id=f"probe-{number}", prompt="hello", params=SamplingParams(max_tokens=tokens, ignore_eos=True))
        started, first = time.perf_counter(), 0.0
        async with aclosing(service.stream(request)) as batches:
            async for _ in batches:
                first = first or time.perf_counter() - started
        return first * 1e3

    busy = [asyncio.create_task(run(-number, 1 << 14)) for number in range(1, TTFT_STREAMS)]
    await asyncio.sleep(0.5)
    times = []
    for i in range(TTFT_PROBES):
        await asyncio.sleep(0.002 + STEP_S * (i % 7) / 7)
        times.append(await run(i, 2))
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    return times


def first_token() -> dict[str, float]:
    """Medians in ms. `added` is the time that HTTP adds, compared with a client of the executor in this process; both have 64 streams."""

    async def in_process(address: str, folder: Path) -> list[float]:
        client = await ZmqExecutorClient.connect(address)
        service = GenerationService("stub", Tokenizer.load(folder), client)
        try:
            return await in_process_first_ms(service)
        finally:
            await service.close()

    over_http: list[float] = []
    local: list[float] = []
    triton_compare.PACE_S = STEP_S
    with triton_compare.stoker() as ports:
        for _ in range(2):
            over_http += http_first_ms(ports.http)
            local += asyncio.run(in_process(ports.address, ports.folder))
    http_ms, local_ms = statistics.median(over_http), statistics.median(local)
    return {
        "streams": TTFT_STREAMS,
        "http_ms": round(http_ms, 2),
        "in_process_ms": round(local_ms, 2),
        "added_ms": round(http_ms - local_ms, 2),
    }


def drain(descriptors: list[int]) -> None:
    """Read from sockets and discard the data, in another process."""
    selector = selectors.DefaultSelector()
    for number in descriptors:
        selector.register(number, selectors.EVENT_READ)
    print("reading", flush=True)
    while selector.get_map():
        for key, _ in selector.select():
            if not os.read(key.fd, 1 << 18):
                selector.unregister(key.fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["throughput", "ttft"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--drain", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drain:
        drain(args.drain)
        return
    found = provenance()
    if args.only != "throughput":
        found["first_token"] = first_token()
    if args.only != "ttft":
        command = [sys.executable, "-m", "stoker", "demo", "--engine"]
        engine = args.engine or Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
        found["throughput"] = [throughput(engine, count, args.tokens, args.rounds) for count in args.streams]
    print(json.dumps(found, indent=1))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
