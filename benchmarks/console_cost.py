"""Measures what the web console costs: the record of each step, and an open live view with its timeline.

    PYTHONPATH=src python benchmarks/console_cost.py [--rows 64] [--rounds 20] [--json FILE]

The model takes no time. The record is measured inside the step loop, where the caches of the processor are used for other things, too. The
live view is compared with none in alternating periods of two seconds, by the CPU time per generated token of two processes: the executor,
with a step every 5 ms, and a frontend that streams `--rows` answers to a client process. A page requests the live view and the timeline
together, once per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import threading
import time
import urllib.request
from typing import Any

import torch
import uvloop
from executor_overhead import StubRunner
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import models, pre_tokenizers

from stoker.base.config import Limits, RuntimeConfig
from stoker.cli.benchmark.results import provenance
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.profiling.batch_run import random_requests
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.client import ExecutorInfo, Mailbox
from stoker.runtime.executor import Executor
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.schedule.scheduler import Scheduler
from stoker.runtime.step_history import StepHistory
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox
from stoker.runtime.worker.step_handle import StepHandle
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredClient, MeteredService
from stoker.server.processes.frontend import HttpServer, http_config
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

MAX_LEN = 1 << 16
PERIOD_S = 2.0
PACE_S = 0.005


class TimedHistory(StepHistory):
    """Measures each call of `record`, in nanoseconds."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        super().__init__()
        self.times: list[int] = []

    def record(self, plan: StepPlan) -> None:
        started = time.perf_counter_ns()
        StepHistory.record(self, plan)  # without super(), which takes a third of the time
        self.times.append(time.perf_counter_ns() - started)


class EmptyTimedHistory(TimedHistory):
    """Measures the measurement alone."""

    def record(self, plan: StepPlan) -> None:
        started = time.perf_counter_ns()
        self.times.append(time.perf_counter_ns() - started)


class PacedRunner(StubRunner):
    """A step takes PACE_S longer, so that the frontend is not the bottleneck."""

    def launch(self, plan: StepPlan) -> StepHandle:
        time.sleep(PACE_S)
        return super().launch(plan)


def stub_info(rows: int) -> ExecutorInfo:
    limits = Limits(max_batch_size=rows, max_input_len=512, max_output_len=MAX_LEN, max_num_tokens=1 << 14)
    return ExecutorInfo(
        limits=limits, max_seq_len=limits.max_seq_len, vocab_size=1000, device="cpu", kv_cache_tokens=rows * MAX_LEN, model="stub"
    )


def stub_executor(rows: int, mailbox: Mailbox, runner_type: type[StubRunner] = StubRunner) -> Executor:
    max_blocks = MAX_LEN // 64 + 16
    scheduler = Scheduler(
        num_blocks=rows * max_blocks, tokens_per_block=64, max_batch_size=rows, max_num_tokens=1 << 14, max_seq_len=MAX_LEN + 512
    )  # fmt: skip
    runner = runner_type(rows, max_blocks, 64, 1 << 14, 0)
    return Executor(runner, scheduler, mailbox, stub_info(rows), RuntimeConfig(max_queue_size=1 << 12, device="cpu"))


def measure_record(rows: int, history: TimedHistory, steps: int = 3000) -> tuple[float, float]:
    """(microseconds of `record` in the step loop, of a step): lower quartiles, because other programs may use the machine."""
    mailbox = SynchronousMailbox(stub_info(rows))
    executor = stub_executor(rows, mailbox)
    executor.step_history = history
    mailbox.submit(random_requests(rows, 200, steps + 200, 1000))
    times = []
    for _ in range(steps):
        started = time.perf_counter_ns()
        executor.turn(0.0)
        times.append(time.perf_counter_ns() - started)
        mailbox.outputs.clear()
    return statistics.quantiles(history.times[200:])[0] / 1e3, statistics.quantiles(times[200:])[0] / 1e3


def run_executor(pipe: Any, rows: int) -> None:
    """The executor process. Each message of the pipe is answered with (CPU seconds, generated tokens)."""
    torch.set_num_threads(1)
    mailbox = ZmqMailbox("tcp://127.0.0.1:*", stub_info(rows))
    executor = stub_executor(rows, mailbox, PacedRunner)
    pipe.send(mailbox.address)

    def answer() -> None:
        """Answer until the pipe is closed."""
        while pipe.recv():
            pipe.send((time.process_time(), executor.stats.num_decode_tokens))

    threading.Thread(target=answer, daemon=True).start()
    executor.run()


def run_frontend(pipe: Any, address: str) -> None:
    """The frontend process. Each message of the pipe is answered with its CPU seconds."""
    uvloop.run(_serve(pipe, address))


async def _serve(pipe: Any, address: str) -> None:
    core = CoreTokenizer(models.WordLevel({f"t{i}": i for i in range(999)} | {"<unk>": 999}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    client, counts, repository = await ZmqExecutorClient.connect(address), FrontendMetrics(), ModelRepository()

    async def load() -> Service:
        return MeteredService(GenerationService("stub", Tokenizer(core), MeteredClient(client, "stub", counts)), counts)

    repository.register("stub", load, lambda service: asyncio.sleep(0))
    await repository.load("stub")
    context = Context(repository, ServerSettings(), counts)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    pipe.send(listener.getsockname()[1])

    def answer() -> None:
        """Answer one message."""
        pipe.recv()
        pipe.send(time.process_time())

    asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
    await HttpServer(http_config(make_app(context), context.settings)).serve(sockets=[listener])


def run_client(port: int, rows: int) -> None:
    """The client process: reads `rows` streams and begins each again when it ends."""
    body = json.dumps({"prompt": "t1 t2 t3", "max_tokens": 4000, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "

    def stream() -> None:
        """Request answers without a pause."""
        while True:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(request + b"%d\r\n\r\n" % len(body) + body)
                while connection.recv(1 << 18):
                    pass

    for _ in range(rows):
        threading.Thread(target=stream, daemon=True).start()
    threading.Event().wait()


def run_viewer(port: int, viewing: Any) -> None:
    """The page's process: while `viewing` is set, requests the live state with the new steps once a second."""
    first = 0
    while viewing.wait():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/console/api/live?detail=1&first_step={first}") as response:
            steps = json.load(response)["steps"]
        first = steps[-1][0] + 1 if steps else first
        time.sleep(1.0)


def measure_view(rows: int, rounds: int) -> dict[str, float]:
    """CPU microseconds per generated token of executor and frontend, without and with an open timeline."""
    context = multiprocessing.get_context("spawn")
    (executor, in_executor), (frontend, in_frontend), viewing = multiprocessing.Pipe(), multiprocessing.Pipe(), context.Event()
    processes = [context.Process(target=run_executor, args=(in_executor, rows), daemon=True)]
    processes[0].start()
    processes.append(context.Process(target=run_frontend, args=(in_frontend, executor.recv()), daemon=True))
    processes[1].start()
    port = frontend.recv()
    for target, arguments in ((run_client, (port, rows)), (run_viewer, (port, viewing))):
        processes.append(context.Process(target=target, args=arguments, daemon=True))
        processes[-1].start()

    def sample() -> tuple[float, float]:
        """(CPU seconds of executor and frontend, generated tokens)."""
        executor.send(True)
        frontend.send(True)
        cpu_s, tokens = executor.recv()
        return cpu_s + frontend.recv(), tokens

    while sample()[1] < 1000 * rows:
        time.sleep(0.2)
    periods: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        variant = int(number % 4 in (1, 2))
        (viewing.set if variant else viewing.clear)()
        before = sample()
        time.sleep(PERIOD_S)
        after = sample()
        periods[variant].append((after[0] - before[0]) / (after[1] - before[1]) * 1e6)
    for process in processes:
        process.kill()
    differences = [b / a - 1 for a, b in zip(*periods, strict=True)]
    without, with_view = map(statistics.median, periods)
    return {"token_us": without, "token_with_view_us": with_view, "median_difference": statistics.median(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20, help="periods with and without a live view")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with_record, step = measure_record(args.rows, TimedHistory())
    alone, _ = measure_record(args.rows, EmptyTimedHistory())
    result = {
        **provenance(),
        "rows": args.rows,
        "record_us": with_record - alone,
        "step_us": step,
        "record_part": (with_record - alone) / step,
    }
    print(result, flush=True)
    result |= measure_view(args.rows, args.rounds)
    print(result)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
