"""Compares Stoker with a real Triton server on the same machine, with the same clients and stub models without computation.

    python benchmarks/triton_compare.py [--streams 32] [--tokens 256] [--rounds 5] [--output benchmarks/results/triton_compare.json]

Measured for each server: streamed responses per second over gRPC with tritonclient and over SSE with a raw client, and the median time of
a unary `generate`. Both servers run during the whole benchmark and are measured in turn; a ratio is the median over rounds. Triton runs an
ensemble of three Python models. Stoker runs a frontend process and, behind the real transport, an executor without a model. Both stubs step
without pauses. Over gRPC only text_output is requested. The client uses the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tritonclient.grpc as tgrpc
from tokenizers import decoders, models, pre_tokenizers

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "scripts"), str(HERE.parent / "tests" / "server")]

from free_ports import free_port  # noqa: E402
from real_triton import RealTriton  # noqa: E402

from stoker.cli.benchmark.results import provenance  # noqa: E402
from stoker.server.processes.child import Child  # noqa: E402
from stoker.server.processes.listeners import bind  # noqa: E402
from stoker.server.processes.tasks import ExecutorPlace, FrontendTask  # noqa: E402
from stoker.server.settings import ServerSettings  # noqa: E402

PACE_S = 0.0  # no pause between steps, as in the stub of Triton
UNARY_REQUESTS = 500


class Ports:
    def __init__(self, http: int, grpc: int, streaming: str, *, address: str = "", folder: Path = Path()) -> None:
        self.http, self.grpc = http, grpc
        self.streaming = streaming  # name of the streaming model
        self.address, self.folder = address, folder  # of the executor and tokenizer of Stoker


@contextlib.contextmanager
def real() -> Iterator[Ports]:
    server = RealTriton.installed()
    http, grpc, metrics = (free_port() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        repository = shutil.copytree(HERE / "triton_stub", Path(folder) / "repository")
        command = server.command([repository], (http, grpc, metrics), f"bench{os.getpid()}_")
        process = subprocess.Popen(command, env=server.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_ready(http)
            yield Ports(http, grpc, "ensemble_decoupled")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@contextlib.contextmanager
def stoker() -> Iterator[Ports]:
    """One frontend process and the stub executor."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0) as listener:
        save_tokenizer(Path(folder))
        address, grpc = f"ipc://{folder}/executor", free_port()
        executor = subprocess.Popen([sys.executable, str(HERE / "triton_stub_executor.py"), address, str(PACE_S)])
        task = FrontendTask(
            "stub", ServerSettings(), [listener.fileno()], f"127.0.0.1:{grpc}", executor=ExecutorPlace(address, folder, folder)
        )
        start = Child.start("frontend", "stoker.server.processes.frontend_entry", task, pass_fds=[listener.fileno()])
        frontend = asyncio.run_coroutine_threadsafe(start, loop).result(30)
        try:
            wait_ready(listener.getsockname()[1])
            yield Ports(listener.getsockname()[1], grpc, "ensemble", address=address, folder=Path(folder))
        finally:
            asyncio.run_coroutine_threadsafe(frontend.stop(5), loop).result(30)
            executor.kill()
            executor.wait()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def save_tokenizer(folder: Path) -> None:
    """A tokenizer with bytes as token ids, like the stub models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))


def wait_ready(port: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"no server is ready on port {port}")


def grpc_rate(ports: Ports, num_streams: int, tokens: int, stoker_side: bool) -> float:
    """Responses per second in the callbacks of `num_streams` streams, with a client each."""
    counts, done = [0] * num_streams, threading.Semaphore(0)
    inputs = grpc_inputs(tokens, stoker_side)

    def callback(at: int) -> Any:
        def count(result: Any, error: Any) -> None:
            assert error is None, error
            counts[at] += 1
            if counts[at] == tokens:
                done.release()

        return count

    clients = [tgrpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") for _ in range(num_streams)]
    for at, client in enumerate(clients):
        client.start_stream(callback(at))
    started = time.perf_counter()
    for client in clients:
        client.async_stream_infer(ports.streaming, inputs, outputs=[tgrpc.InferRequestedOutput("text_output")])
    for _ in clients:
        assert done.acquire(timeout=120)
    elapsed = time.perf_counter() - started
    for client in clients:
        client.stop_stream()
        client.close()
    return num_streams * tokens / elapsed


def grpc_inputs(tokens: int, stoker_side: bool) -> list[Any]:
    values = {"text_input": np.array([[b"hello"]], object), "max_tokens": np.array([[tokens]], np.int32)}
    values |= {"stream": np.array([[True]])} if stoker_side else {}
    kinds = {"O": "BYTES", "i": "INT32", "b": "BOOL"}
    tensors = []
    for name, array in values.items():
        tensors.append(tgrpc.InferInput(name, [1, 1], kinds[array.dtype.kind]))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def post(model: str, action: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v2/models/{model}/{action} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def sse_rate(ports: Ports, num_streams: int, tokens: int, stoker_side: bool) -> float:
    """Events per second over raw sockets that stay open."""
    fields = {"text_input": "hello", "max_tokens": tokens} | ({"stream": True} if stoker_side else {})
    request = post(ports.streaming, "generate_stream", fields)
    selector = selectors.DefaultSelector()
    started = time.perf_counter()
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", ports.http))
        stream.sendall(request)
        selector.register(stream, selectors.EVENT_READ, [0])
    while selector.get_map():
        for key, _ in selector.select(60):
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            key.data[0] += data.count(b"data: {")
            if key.data[0] >= tokens or not data:
                assert key.data[0] == tokens
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return num_streams * tokens / (time.perf_counter() - started)


def unary_ms(ports: Ports) -> float:
    """The median time of a `generate` of one token over one connection, one after another."""
    request = post("ensemble", "generate", {"text_input": "hello", "max_tokens": 1})
    times = []
    with socket.create_connection(("127.0.0.1", ports.http)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(UNARY_REQUESTS):
            started = time.perf_counter()
            connection.sendall(request)
            response = b""
            while b'"text_output"' not in response or not response.endswith((b"}", b"0\r\n\r\n")):
                response += connection.recv(1 << 16)
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def measure(sides: dict[str, Ports], num_streams: int, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The results of each server in each round, after a warm-up. Servers are measured in turn, so that other work affects both."""
    found: dict[str, dict[str, list[float]]] = {name: {"grpc": [], "sse": [], "unary": []} for name in sides}
    for at in range(rounds + 1):
        for measurement, run in (
            ("grpc", lambda ports, is_stoker: grpc_rate(ports, num_streams, tokens, is_stoker)),
            ("sse", lambda ports, is_stoker: sse_rate(ports, num_streams, tokens, is_stoker)),
            ("unary", lambda ports, is_stoker: unary_ms(ports)),
        ):
            for name, ports in sides.items():
                value = run(ports, name == "stoker")
                if at:
                    found[name][measurement].append(value)
    return found


def best_rounds(results: dict[str, list[float]]) -> dict[str, float]:
    """The best round of each measurement."""
    return {
        "grpc_responses_per_s": round(max(results["grpc"])),
        "sse_events_per_s": round(max(results["sse"])),
        "unary_p50_ms": round(min(results["unary"]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with real() as triton_ports, stoker() as stoker_ports:
        rounds = measure({"triton": triton_ports, "stoker": stoker_ports}, args.streams, args.tokens, args.rounds)
    found = {
        **provenance(),
        "clients": {
            "tritonclient": importlib.metadata.version("tritonclient"),
            "triton": "2.51.0",
        },
        "load": round(os.getloadavg()[0], 1),
        "streams": args.streams,
        "tokens": args.tokens,
        **{name: best_rounds(results) for name, results in rounds.items()},
        "ratios": {  # medians over the rounds
            name: round(statistics.median(b / a for a, b in zip(rounds["triton"][name], rounds["stoker"][name], strict=True)), 2)
            for name in ("grpc", "sse", "unary")
        },
    }
    print(json.dumps(found, indent=1))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
