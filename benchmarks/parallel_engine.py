"""Measures an engine of several ranks: decode steps, throughput at maximum load, and the kernels of the leader. `parallel.py` runs it.

PYTHONPATH=src python benchmarks/parallel_engine.py --build llama-3.1-8b:2::engine
PYTHONPATH=src python benchmarks/parallel_engine.py --engine engine --latency 1x1000,64x1000 --json results.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.base import logging
from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import StokerError
from stoker.cli.benchmark.breakdown import decode_breakdown
from stoker.cli.benchmark.executor import ExecutorBenchmark
from stoker.cli.benchmark.results import provenance

HERE = Path(__file__).parent
STEPS = 128  # decode steps of which the median is reported
MIN_S = 2.5  # of decode steps, because the driver measures utilization over at least 1/6 s
SETTLING = 8
BREAKDOWN_S = 45  # limit, after which the process ends
OUTPUT_LEN = 2048

Report = Callable[[dict[str, Any]], None]


class GpuUtilization:
    """The fraction of time in which a kernel ran on each visible GPU, as the driver reports it."""

    def __enter__(self) -> GpuUtilization:
        """Wait until the driver reports values."""
        self.seen: dict[str, list[int]] = defaultdict(list)
        self._started = threading.Event()
        ids = os.environ.get("CUDA_VISIBLE_DEVICES")
        command = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(
                [*command, *(["-i", ids] if ids else [])], stdout=subprocess.PIPE, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()
            self._started.wait(5.0)
        except OSError:
            self.process = None
        return self

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self._started.set()
            index, _, percent = line.partition(",")
            if percent.strip().isdigit():
                self.seen[index.strip()].append(int(percent))

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def fractions(self) -> dict[str, float]:
        """The mean by GPU, without the first and last values."""
        return {index: round(statistics.mean(seen[3:-1]) / 100, 3) for index, seen in self.seen.items() if len(seen) > 5}


def latency(bench: ExecutorBenchmark, batch: int, context: int) -> dict[str, Any]:
    """The median decode step after `context` tokens per row, and the GPU utilization over MIN_S of them."""
    executor = bench.executor
    bench.submit(batch, context, OUTPUT_LEN)
    executor.turn(0.0)
    while executor.stats.last_step_prefill_tokens or executor.scheduler.num_running < batch:
        executor.turn(0.0)
    for _ in range(SETTLING):
        executor.turn(0.0)
    with GpuUtilization() as utilization:
        turns = list(timed_turns(bench, batch))
    bench.cancel_submitted()
    first = turns[:STEPS]
    return {
        "batch": batch,
        "context": context,
        "step_ms": statistics.median(first) * 1e3,
        "max_step_ms": max(first) * 1e3,
        "steps": len(turns),
        "busy": utilization.fractions,
    }


def timed_turns(bench: ExecutorBenchmark, batch: int) -> Iterator[float]:
    """Seconds of each step, until there are enough steps or the first row ends."""
    executor, begin = bench.executor, time.perf_counter()
    last, count = begin, 0
    while (count < STEPS or last - begin < MIN_S) and executor.scheduler.num_running == batch:
        executor.turn(0.0)
        bench.executor.mailbox.pop_outputs()  # type: ignore[attr-defined]
        now = time.perf_counter()
        yield now - last
        last, count = now, count + 1


def throughput(bench: ExecutorBenchmark, count: int, isl: int, osl: int, report: Report) -> dict[str, Any]:
    """Output tokens per second of `count` concurrent requests. The progress is reported meanwhile."""
    stop = threading.Event()
    threading.Thread(target=progress, args=(bench.executor.stats, report, stop), daemon=True).start()
    with GpuUtilization() as utilization:
        result = bench.run(count, isl, osl)
    stop.set()
    return {
        "isl": isl,
        "osl": osl,
        "requests": count,
        "output_tokens_per_s": result.output_tokens_per_s,
        "total_s": result.total_s,
        "busy": utilization.fractions,
    }


def progress(stats: Any, report: Report, stop: threading.Event) -> None:
    """Report output and prompt tokens so far, the rows of a step, and output tokens per second since the previous report."""
    started = last = time.monotonic()
    before, prompts = stats.num_decode_tokens, stats.num_prefill_tokens
    reported = before
    while not stop.wait(2.5):
        now, tokens = time.monotonic(), stats.num_decode_tokens
        report(
            {
                "tokens": tokens - before,
                "prompt_tokens": stats.num_prefill_tokens - prompts,
                "seconds": round(now - started, 2),
                "rows": stats.last_step_rows,
                "tokens_per_s": round((tokens - reported) / (now - last)),
            }
        )
        last, reported = now, tokens


def breakdown(bench: ExecutorBenchmark, batch: int, context: int) -> dict[str, Any]:
    """The kernels of the leader's device in decode steps, by time."""
    signal.alarm(BREAKDOWN_S)
    try:
        found = decode_breakdown(bench, batch, context)
        found["kernels"] = found["kernels"][:16]
    except (StokerError, RuntimeError) as error:  # continue without the profiler
        found = {"error": str(error)}
    signal.alarm(0)
    return {"batch": batch, "context": context, "leader": found}


def measure(args: argparse.Namespace) -> None:
    """Measure latencies, then throughput, then breakdowns. Results are written immediately, so that a failure loses none of them."""
    started = time.monotonic()
    runtime = RuntimeConfig(
        prefix_reuse=False, custom_all_reduce=not args.nccl, max_batch_size=args.max_batch, kv_cache_fraction=args.memory_fraction
    )
    bench = ExecutorBenchmark(Path(args.engine), runtime)
    about = {"what": args.name, **provenance(Path(args.engine), bench.executor.info.device)}

    def report(row: dict[str, Any]) -> None:
        line = json.dumps(about | row | {"after_s": round(time.monotonic() - started, 1)}, ensure_ascii=False)
        print(line, flush=True)
        with Path(args.json).open("a") as file:
            file.write(line + "\n")

    report({"ready_s": round(time.monotonic() - started, 1), **bench.kernel_counts})
    for batch, context in pairs(args.latency):
        report(latency(bench, batch, context))
    for lengths in filter(None, args.throughput.split(",")):
        shape, _, count = lengths.partition(":")
        isl, osl = map(int, shape.split("/"))
        report(throughput(bench, int(count), isl, osl, report))
    for batch, context in pairs(args.breakdown):
        report(breakdown(bench, batch, context))
    bench.executor.close()


def pairs(text: str) -> Iterator[tuple[int, int]]:
    for item in filter(None, text.split(",")):
        first, second = item.split("x")
        yield int(first), int(second)


def build_all(builds: list[str], device: str) -> None:
    """Build engines with dummy weights and compiled kernels on half of the cores; the other half is for measurements."""
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig
    from stoker.runtime.aot import compile_kernels

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[len(cores) // 2 :])
    limits = Limits(max_batch_size=768, max_input_len=2048, max_output_len=OUTPUT_LEN, max_num_tokens=8192)
    for item in builds:
        model, ranks, quantization, out = item.split(":", 3)
        began = time.monotonic()
        config = BuildConfig(
            dtype="bfloat16",
            dummy_weights=True,
            limits=limits,
            device=device,
            quantization=quantization or None,
            mapping=Mapping(tensor_parallel=int(ranks)),
        )
        build(HERE / "models" / model, Path(out), config, verify="none", kernels=compile_kernels)
        print(f"{out}: built in {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--build", nargs="+", metavar="MODEL:RANKS:QUANTIZATION:OUT", help="only build engines; MODEL is a folder of benchmarks/models"
    )
    parser.add_argument("--device", default="cuda", help="target of --build")
    parser.add_argument("--engine", help="engine to measure")
    parser.add_argument("--name", default="")
    parser.add_argument("--latency", default="", help="BATCHxCONTEXT,...")
    parser.add_argument("--throughput", default="", help="INPUT/OUTPUT:REQUESTS,...")
    parser.add_argument("--breakdown", default="", help="BATCHxCONTEXT,...")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--memory-fraction", type=float, help="fraction of the free memory for the KV cache")
    parser.add_argument("--nccl", action="store_true", help="use NCCL only")
    parser.add_argument("--json", default="parallel.jsonl")
    args = parser.parse_args()
    logging.configure("INFO")
    if args.build:
        build_all(args.build, args.device)
    else:
        measure(args)


if __name__ == "__main__":
    main()
