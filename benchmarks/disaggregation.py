"""Measures disaggregated prefill and decode over HTTP: moving the KV cache of prompts, and the latency between tokens beside prompts.

    PYTHONPATH=src python benchmarks/disaggregation.py engine [--devices 0 1] [--backend nixl] [--json results.json]

Two servers, by default on two GPUs, one of which computes prompts for the other, are started behind `stoker route`. With an engine for the
CPU they share it, so that only the numbers of transfers mean something. Three measurements:

moved: prompts that the first server has in its cache already, one at a time, so that only their blocks are moved. The floor is their bytes
at the bandwidth of one direction of NVLink, 450 GB/s on an H200, or of the network. `transfer_ms` begins when the first server has the
blocks and the second one has room for them, and `with_waits_ms` when the second one receives the request.
computed: new prompts, one at a time; their layers are moved while the next ones are computed.
between_tokens: the times between the texts of streams on the second server, alone, while prompts arrive that the first one computes
(`split`), and while prompts arrive that the second one computes (`together`). The ratio is the 99th percentile with prompts to that
without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stoker.base import env
from stoker.cli.benchmark.results import percentile, provenance
from stoker.cli.clients.http import get
from stoker.cli.clients.metrics import read_metrics
from stoker.cli.commands.bench.serving import RequestTimes, time_request
from stoker.cli.server_process import running_server
from stoker.engine.reader import Engine

COUNT = 10  # prompts that are moved one at a time
STREAM_PROMPT = 64  # tokens: not transferred
PROMPT_ANSWER = 8  # generated tokens of a prompt that arrives beside streams
CPU_CACHE_TOKENS = 1 << 16  # of each server, because both share the memory
ATTEMPTS = 100  # to find the router's replicas ready
IDLE_S = 10.0  # in which servers for a GPU capture the steps that were not captured at the start


class Fleet:
    """Two servers and their router."""

    def __init__(self, prefill: str, decode: str, router: str, model: str) -> None:
        self.prefill, self.decode, self.router, self._model = prefill, decode, router, model
        self._dice = random.Random(0)

    def body(self, num_prompt: int, num_generated: int) -> dict[str, Any]:
        """A request with a new prompt."""
        ids = self._dice.choices(range(100, 300), k=num_prompt)
        return {"model": self._model, "prompt": ids, "max_tokens": num_generated, "temperature": 0, "ignore_eos": True}

    async def moved(self, num_prompt: int, is_cached: bool) -> dict[str, Any]:
        """Send prompts to the router, one at a time; with `is_cached`, the first server has computed them before."""
        before, first_ms = await read_metrics(self.decode), []
        for _ in range(COUNT):
            body = self.body(num_prompt, 2)
            if is_cached:
                await time_request(self.prefill, {**body, "max_tokens": 1})
            first_ms.append(1e3 * (await time_request(self.router, body)).first_s)
        after = await read_metrics(self.decode)
        names = ("num_imports", "num_failed_imports", "imported_bytes", "import_time_s", "import_read_time_s")
        found = {name: after[name] - before[name] for name in names}
        if found["num_imports"] != COUNT:
            raise RuntimeError(f"{COUNT} prompts were sent and {found['num_imports']:g} transferred: see the log of the servers")
        return {
            "prompt_tokens": num_prompt,
            "megabytes": round(found["imported_bytes"] / COUNT / 1e6, 2),
            "transfer_ms": round(1e3 * found["import_read_time_s"] / COUNT, 2),
            "gigabytes_per_s": round(found["imported_bytes"] / found["import_read_time_s"] / 1e9, 2),
            "with_waits_ms": round(1e3 * found["import_time_s"] / COUNT, 2),
            "first_token_ms": round(statistics.median(first_ms), 2),
        }

    async def between_tokens(self, args: argparse.Namespace, prompts_to: str | None) -> dict[str, Any]:
        """The latency between tokens of the streams while prompts are sent to `prompts_to`, or without any."""
        before = await read_metrics(self.decode)
        streams = [asyncio.create_task(time_request(self.decode, self.body(STREAM_PROMPT, args.tokens))) for _ in range(args.streams)]
        prompts: list[asyncio.Task[RequestTimes]] = []
        while prompts_to is not None and not all(stream.done() for stream in streams):
            await asyncio.sleep(self._dice.expovariate(args.rate))
            prompts.append(asyncio.create_task(time_request(prompts_to, self.body(args.prompt, PROMPT_ANSWER))))
        gaps = [gap for times in await asyncio.gather(*streams) for gap in times.gaps_s]
        answered = await asyncio.gather(*prompts)
        after = await read_metrics(self.decode)
        return {
            "prompts": len(prompts),
            "transferred": int(after["num_imports"] - before["num_imports"]),
            "between_ms": {f"p{p}": round(1e3 * percentile(gaps, p), 2) for p in (50, 90, 99, 99.9)},
            "first_token_ms": round(1e3 * statistics.median(times.first_s for times in answered), 2) if answered else None,
        }

    async def wait_until_routed(self) -> None:
        """Return when the router knows that a server computes prompts for the other one."""
        for _ in range(ATTEMPTS):
            before = await read_metrics(self.decode)
            await time_request(self.router, self.body(1024, 2))
            if (await read_metrics(self.decode))["num_imports"] > before["num_imports"]:
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the router does not let one server compute prompts for the other")


@contextmanager
def running_router(replicas: list[str], tokenizer: Path) -> Iterator[str]:
    """Start `stoker route`, and yield its URL."""
    command = [sys.executable, "-m", "stoker", "route", *replicas, "--port", "0", "--tokenizer", str(tokenizer), "--no-access-log"]
    command += ["--health-timeout-s", "60"]  # servers that share a CPU answer late
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env.child_environment()) as process:
        assert process.stdout is not None
        try:
            yield next(word for word in process.stdout.readline().split() if word.startswith("http"))
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


async def measure(args: argparse.Namespace, prefill: str, decode: str, router: str) -> dict[str, Any]:
    """All three measurements."""
    model = json.loads(await get(decode, "/v1/models"))["data"][0]["id"]
    fleet = Fleet(prefill, decode, router, model)
    await fleet.wait_until_routed()
    await asyncio.sleep(args.idle)
    found = {"moved": await fleet.moved(args.prompt, True), "computed": await fleet.moved(args.prompt, False)}
    await fleet.between_tokens(args, None)  # all shapes run once
    latency = {"alone": await fleet.between_tokens(args, None)}
    for name, url in (("split", router), ("together", decode)):
        latency[name] = await fleet.between_tokens(args, url)
        latency[name]["ratio_p99"] = round(latency[name]["between_ms"]["p99"] / latency["alone"]["between_ms"]["p99"], 3)
    return {**found, "between_tokens": latency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--devices", nargs=2, default=("0", "1"), help="of the server for prompts and of the other one, for a GPU engine")
    parser.add_argument("--backend", choices=("auto", "nixl", "tcp"), default="auto")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of a stream; at 4 ms per step, 16 prompts arrive beside it")
    parser.add_argument("--rate", type=float, default=2.0, help="prompts per second beside the streams")
    parser.add_argument("--idle", type=float, help="seconds without requests before the measurements; by default 10 for a GPU engine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    is_gpu = Engine.open(args.engine).config.target.device == "cuda"
    if args.idle is None:
        args.idle = IDLE_S if is_gpu else 0.0
    os.environ.setdefault("STOKER_CLUSTER_TOKEN", secrets.token_hex(32))
    with ExitStack() as stack:
        urls = []
        for role, device in zip(("prefill", "decode"), args.devices, strict=True):
            options = ["--transfer", "127.0.0.1:0", "--role", role, "--transfer-backend", args.backend]
            options += ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*"]
            options += ["--devices", device] if is_gpu else ["--kv-cache-tokens", str(CPU_CACHE_TOKENS)]
            urls.append(stack.enter_context(running_server(args.engine, options)))
        router = stack.enter_context(running_router(urls, args.engine))
        results = asyncio.run(measure(args, *urls, router))
    settings = {"backend": args.backend, "streams": args.streams, "stream_tokens": args.tokens, "prompts_per_s": args.rate}
    output = json.dumps({**provenance(args.engine, "cuda" if is_gpu else "cpu"), **settings, **results}, indent=1)
    print(output)
    if args.json is not None:
        args.json.write_text(output + "\n")


if __name__ == "__main__":
    main()
