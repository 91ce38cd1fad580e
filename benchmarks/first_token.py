"""Measures the time to the first token over HTTP for single requests, with random weights and an artificial tokenizer of the model's size.

    PYTHONPATH=src python benchmarks/first_token.py --config benchmarks/models/llama-3.1-8b --quantize FP8 --json first_token.json

The client is a blocking socket, which writes each request at once. Measured with a new connection for each request, and with one that is
kept. `stages_ms` divides the median request by times that the server reports in any case, after its answer:

    connect     the client opens the connection
    http        the server accepts the connection, reads and checks the request, and writes the first event; the client reads it
    prepare     the prompt is tokenized and checked against the limits of the engine
    transport   the request reaches the step loop and is planned; the output returns to the HTTP process
    step        the step that computes the prompt, from its launch until its token is on the host
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tokenizers

from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import percentile, provenance
from stoker.cli.clients.http import get
from stoker.cli.server_process import running_server
from stoker.runtime.aot import compile_kernels
from stoker.server.metrics.live_view import MIN_AGE_S

WARM_UP = 5  # requests, for all shapes
CAPTURES_S = 10.0  # a GPU's steps that were not captured at the start are captured in idle time, also between two requests
MAX_LIVE_STEPS = 256  # that the server reports at once


def save_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `size` tokens that all have text, so that every id of a random model adds text to the response."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{i}" for i in range(size - len(letters)))]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    folder.mkdir(parents=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


class Client:
    """Sends requests one after another. With `keep`, all of them use one connection."""

    def __init__(self, url: str, *, keep: bool) -> None:
        self._url = urlsplit(url)
        self._keep = keep
        self._socket: socket.socket | None = None

    def first_token(self, body: dict[str, Any]) -> dict[str, float]:
        """Milliseconds of a streamed completion: `first`, `connect`, and the times of the server's phases. Raises ValueError."""
        data = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {self._url.netloc}", "Content-Type: application/json", "X-Return-Timings: 1"]
        lines += [f"Content-Length: {len(data)}", *([] if self._keep else ["Connection: close"]), "", ""]
        request = "\r\n".join(lines).encode() + data
        started = time.perf_counter()
        connection = self._socket or self._connect()
        connected = time.perf_counter()
        connection.sendall(request)
        response = b""
        while b"data: {" not in response:
            response += self._receive(connection, response)
        first = time.perf_counter()
        while b"[DONE]\n\n\r\n0\r\n\r\n" not in response:
            response += self._receive(connection, response)
        if not self._keep:
            connection.close()
            self._socket = None
        events = [json.loads(line[6:]) for line in response.split(b"\n") if line.startswith(b"data: {")]
        if not events[0]["choices"][0]["text"] or events[-1]["usage"]["completion_tokens"] != body["max_tokens"]:
            raise ValueError(f"unexpected answer: {response[:500]!r}")
        times = {f"server_{name}": ms for name, ms in events[-1]["usage"]["timings_ms"].items()}
        return {"first": (first - started) * 1e3, "connect": (connected - started) * 1e3, **times}

    def _connect(self) -> socket.socket:
        assert self._url.hostname is not None
        self._socket = socket.create_connection((self._url.hostname, self._url.port or 80), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def _receive(self, connection: socket.socket, before: bytes) -> bytes:
        """More bytes of a response. Raises ValueError at its end."""
        if not (data := connection.recv(1 << 16)):
            raise ValueError(f"the server closed the connection after {before[:500]!r}")
        return data


def requests(input_len: int, output_len: int) -> Iterator[dict[str, Any]]:
    """Bodies with random prompts, for the first model of the server."""
    draw = random.Random(0)
    options = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    while True:
        yield {"prompt": draw.choices(range(300, 30_000), k=input_len), **options}


def prompt_steps_ms(url: str, input_len: int) -> list[float]:
    """Milliseconds of the newest steps that computed one whole prompt and nothing else."""
    time.sleep(MIN_AGE_S)  # a younger state is not replaced
    steps = json.loads(asyncio.run(get(url, "/console/api/live?first_step=0")))["steps"]
    return [duration_s * 1e3 for _, _, duration_s, _, num_decodes, _, num_new in steps if not num_decodes and num_new == [input_len]]


def measure(url: str, bodies: Iterator[dict[str, Any]], count: int, input_len: int, *, keep: bool) -> dict[str, Any]:
    """One row of results: `count` requests one after another, after a warm-up."""
    client = Client(url, keep=keep)
    rows = [client.first_token(next(bodies)) for _ in range(WARM_UP + count)][WARM_UP:]
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    step = statistics.median(prompt_steps_ms(url, input_len)[-count:])
    in_server = median["server_prepare"] + median["server_queue"] + median["server_prefill"]  # up to the first token
    stages = {
        "connect": median["connect"],
        "http": median["first"] - median["connect"] - in_server,
        "prepare": median["server_prepare"],
        "transport": in_server - median["server_prepare"] - step,
        "step": step,
    }
    first = [row["first"] for row in rows]
    return {
        "input_len": input_len,
        "connection": "kept" if keep else "new",
        "first_token_ms": {"median": statistics.median(first), "p90": percentile(first, 90), "max": max(first)},
        "stages_ms": {name: round(ms, 3) for name, ms in stages.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", help="a format of stoker build, such as FP8")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--options", default="", help="further options of stoker serve")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.requests * args.output_len > MAX_LIVE_STEPS:
        parser.error(f"the server reports its newest {MAX_LIVE_STEPS} steps: requests × output tokens must not be more")
    with tempfile.TemporaryDirectory() as folder:
        engine, size = Path(folder) / "engine", json.loads((Path(args.config) / "config.json").read_text())["vocab_size"]
        save_tokenizer(Path(folder) / "tokenizer", size)
        config = BuildConfig(
            dtype=args.dtype,
            dummy_weights=True,
            limits=Limits(max_batch_size=16, max_input_len=512, max_output_len=128, max_num_tokens=2048),
            device=args.device,
            tokenizer=folder + "/tokenizer",
            quantization=args.quantize,
        )
        build(args.config, engine, config, verify="none", kernels=compile_kernels)
        started = time.time()
        with running_server(engine, args.options.split()) as url:
            ready_s = time.time() - started
            if args.device == "cuda":
                time.sleep(CAPTURES_S)
            bodies = requests(args.input_len, args.output_len)
            rows = [measure(url, bodies, args.requests, args.input_len, keep=keep) for keep in (False, True)]
        about = provenance(engine, args.device)
    for row in rows:
        print(row, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({**about, "server_ready_s": ready_s, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
