"""Measures the reuse of prefixes by four servers behind `stoker route`: 200 conversations of 8 turns, in real time and over HTTP.

    PYTHONPATH=src python benchmarks/conversations.py [--json benchmarks/results/conversations.json]

Each server has a process with the HTTP server, and one with the executor, the scheduler, the KV cache manager and the block events of
`stoker serve`. Only the model is replaced by one that sleeps for the time that a step of a 70B model takes on an H200. The router is
`stoker route` in a process of its own. The runs: four replicas with the policies prefix and round_robin, and one replica with four times
the KV cache and the rows, and a quarter of the step times. `benchmarks/simulate.py conversations` simulates the same fleet; the last row
compares them.

`--only single --repeat 4 --json FILE` adds runs to a file of results, because one run of 42 s is a small sample.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import uvloop

NUM_CONVERSATIONS, NUM_TURNS, SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 200, 8, 200, 300, 100
ROWS, KV_CACHE_TOKENS, MAX_NUM_TOKENS, BLOCK = 64, 256_000, 2048, 64  # of one of the four replicas
TOKEN = 40  # what every step yields
RUNS = {"prefix": (4, "prefix"), "round_robin": (4, "round_robin"), "single": (1, "prefix")}  # (replicas, policy)
RESULTS = Path(__file__).parent / "results"
STEP_TIMES = RESULTS / "h200_llama70b_fp8_step_times.json"
TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / area) for area in ("builder", "server", "frontend")]


def serve_replica(factor: int) -> None:
    """Run the executor of one replica, which is as large and as fast as `factor` of the four, and a process with its HTTP server."""
    import torch

    from stoker.base.config import Limits, RuntimeConfig
    from stoker.base.process import freeze_objects
    from stoker.runtime.client import ExecutorInfo
    from stoker.runtime.executor import Executor
    from stoker.runtime.kv.events.log import BlockEventLog
    from stoker.runtime.kv.events.publisher import EventPublisher
    from stoker.runtime.request import Sequence, TokenRequest
    from stoker.runtime.schedule.plan import StepPlan
    from stoker.runtime.schedule.scheduler import Scheduler
    from stoker.runtime.transport.zmq_mailbox import ZmqMailbox
    from stoker.runtime.worker.step_handle import StepHandle
    from stoker.simulation.step_times import read_step_times

    times = read_step_times(STEP_TIMES)

    class SleepingRunner:
        """A model whose steps take the time of `times`, and yield TOKEN."""

        capture_is_due = False

        def prepare(self, request: TokenRequest) -> None: ...
        def add(self, seq: Sequence) -> None: ...
        def remove(self, seq: Sequence) -> None: ...
        def zero_blocks(self, blocks: list[int]) -> None: ...
        def close(self) -> None: ...

        def capture_next(self) -> bool:
            return False

        def launch(self, plan: StepPlan) -> StepHandle:
            seconds = times.fixed_s + times.row_s * plan.num_decodes + times.prefill_token_s * plan.num_prefill_tokens
            time.sleep((seconds + times.context_token_s * sum(plan.starts)) / factor)
            sampled = [seq for seq, samples in zip(plan.sequences, plan.samples, strict=True) if samples]
            return StepHandle(sampled, torch.full((len(sampled),), TOKEN, dtype=torch.int32))

    limits = Limits(
        max_batch_size=ROWS * factor, max_input_len=8192, max_output_len=1024, max_num_tokens=MAX_NUM_TOKENS * factor,
        tokens_per_block=BLOCK,
    )  # fmt: skip
    events = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "", BLOCK)
    info = ExecutorInfo(
        limits=limits, max_seq_len=9216, vocab_size=320, device="cpu", kv_cache_tokens=KV_CACHE_TOKENS * factor, model="stub",
        kv_events=events.address,
    )  # fmt: skip
    scheduler = Scheduler(
        num_blocks=KV_CACHE_TOKENS * factor // BLOCK, tokens_per_block=BLOCK, max_batch_size=ROWS * factor,
        max_num_tokens=MAX_NUM_TOKENS * factor, max_seq_len=9216, event_log=BlockEventLog(),
    )  # fmt: skip
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", info)
    executor = Executor(SleepingRunner(), scheduler, mailbox, info, RuntimeConfig(max_queue_size=1 << 16), events=events)
    subprocess.Popen([sys.executable, __file__, "--serve-frontend", mailbox.address])
    freeze_objects()
    executor.run()


async def serve_frontend(address: str) -> None:
    """Run the HTTP server of a replica whose executor has this address, and print its URL."""
    import socket
    import tempfile

    import tiny
    from scripted_service import make_context

    from stoker.base.process import freeze_objects
    from stoker.frontend.generation import GenerationService
    from stoker.frontend.tokenizer import Tokenizer
    from stoker.runtime.transport.zmq_client import ZmqExecutorClient
    from stoker.server.application import make_app
    from stoker.server.processes.frontend import HttpServer, http_config

    with tempfile.TemporaryDirectory() as folder:
        tiny.save_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(folder)
    service = GenerationService("stub", tokenizer, await ZmqExecutorClient.connect(address))
    context = await make_context(service, log_requests="none")
    server = HttpServer(http_config(make_app(context), context.settings))
    listener = socket.create_server(("127.0.0.1", 0))
    freeze_objects()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await server.serve(sockets=[listener])


def serve_router(policy: str, *replicas: str) -> None:
    """Serve the router, and print its URL."""
    from stoker.router.core.settings import RoutingSettings
    from stoker.router.proxy.serve import serve
    from stoker.router.settings import RouterSettings

    routing = RoutingSettings(policy=policy, max_in_flight=1 << 16)
    settings = RouterSettings(replicas=replicas, http_port=0, access_log=False, routing=routing)
    serve(settings, lambda line: print(line.split(" (")[0], flush=True))


async def measure(num_replicas: int, policy: str, num_conversations: int) -> dict[str, float]:
    """Run the conversations. All begin within eight seconds; a user answers after one to four seconds."""
    import aiohttp

    factor = 4 // num_replicas
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await _program(stack, "replica", str(factor)) for _ in range(num_replicas)]
        router = await _program(stack, "router", policy, *replicas)
        timeout = aiohttp.ClientTimeout(total=600)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)))
        words = random.Random(1)
        system = [words.randrange(50, 300) for _ in range(SYSTEM_TOKENS)]
        first_token_s: list[float] = []
        counts = {"prompt": 0, "cached": 0}

        async def converse(number: int) -> None:
            """All turns of one conversation."""
            dice = random.Random(number)
            await asyncio.sleep(number * 8 / num_conversations)
            tokens = list(system)
            for turn in range(NUM_TURNS):
                tokens += [dice.randrange(50, 300) for _ in range(USER_TOKENS)]
                body = {
                    "prompt": tokens, "max_tokens": ANSWER_TOKENS, "stream": True, "stream_options": {"include_usage": True},
                    "ignore_eos": True, "temperature": 0,
                }  # fmt: skip
                started = time.perf_counter()
                async with client.post(f"{router}/v1/completions", json=body, headers={"x-session-id": str(number)}) as response:
                    assert response.status == 200, await response.text()
                    text = bytearray(await response.content.readany())
                    first_token_s.append(time.perf_counter() - started)
                    text += await response.read()
                usage = json.loads(text.split(b"data: ")[-2])["usage"]
                assert usage["completion_tokens"] == ANSWER_TOKENS and usage["prompt_tokens"] == len(tokens)
                counts["prompt"] += len(tokens)
                counts["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
                tokens += [TOKEN] * ANSWER_TOKENS
                if turn < NUM_TURNS - 1:
                    await asyncio.sleep(dice.uniform(1, 4))

        started = time.perf_counter()
        await asyncio.gather(*map(converse, range(num_conversations)))
        return {
            "requests": len(first_token_s),
            "reuse_rate": counts["cached"] / counts["prompt"],
            "first_token_median_ms": 1000 * statistics.median(first_token_s),
            "first_token_p90_ms": 1000 * statistics.quantiles(first_token_s, n=10)[8],
            "seconds": time.perf_counter() - started,
            "load_average": os.getloadavg()[0],
        }


async def _program(stack: contextlib.AsyncExitStack, kind: str, *args: str) -> str:
    """Start this file as another process that serves. Returns its URL."""
    command = [sys.executable, __file__, f"--serve-{kind}", *args]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)

    async def stop() -> None:
        os.killpg(process.pid, signal.SIGTERM)  # with the HTTP server of an executor
        await process.wait()

    stack.push_async_callback(stop)
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().split()[-1]


def main() -> None:
    if sys.argv[1:2] == ["--serve-replica"]:
        serve_replica(int(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--serve-frontend"]:
        uvloop.run(serve_frontend(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--serve-router"]:
        serve_router(*sys.argv[2:])
        return
    from stoker.cli.benchmark.results import provenance

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=NUM_CONVERSATIONS)
    parser.add_argument("--only", choices=RUNS, help="repeat this run only")
    parser.add_argument("--repeat", type=int, default=1, help="number of runs of --only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def run(name: str) -> dict[str, float]:
        row = uvloop.run(measure(*RUNS[name], args.conversations))
        print(name, json.dumps(row, indent=1), flush=True)
        return row

    if args.only is not None:
        repeated = {**provenance(), "runs": [run(args.only) for _ in range(args.repeat)]}
        if args.json is not None:
            found = json.loads(args.json.read_text())
            found[f"{args.only}_repeated"] = repeated
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    rows = {**provenance(), **{name: run(name) for name in RUNS}}
    rows["reuse_rate_of_single"] = rows["prefix"]["reuse_rate"] / rows["single"]["reuse_rate"]
    rows["first_token_of_round_robin"] = rows["prefix"]["first_token_median_ms"] / rows["round_robin"]["first_token_median_ms"]
    simulated = json.loads((RESULTS / "simulate.json").read_text())["conversations"]["70b over http"]
    rows["simulated"] = {
        name: {key: simulated[name][key] for key in ("reuse_rate", "first_token_median_ms", "simulated_s")}
        for name in ("prefix", "round_robin", "single")
    }
    print(json.dumps({name: rows[name] for name in ("reuse_rate_of_single", "first_token_of_round_robin", "simulated")}, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
