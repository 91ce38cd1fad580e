"""Measures the slowest steps of an executor under steady load: a new request arrives whenever one ends, for a number of seconds.

PYTHONPATH=src python benchmarks/slow_steps.py --config benchmarks/models/llama-3.1-8b --quantize FP8 --rows 64

Runs once as an executor without `freeze_objects` and once with it, or only with it. Each decode step is compared with the median of those
around it, because steps become slower as contexts grow, and each step with a prompt with the median of those that have as many tokens. The
pauses of the garbage collector are measured by its callbacks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from stoker.base import logging
from stoker.base.config import Limits, RuntimeConfig
from stoker.base.process import freeze_objects
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.aot import compile_kernels
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor

NEIGHBOURS = 200  # steps before and after, of the same kind
SLOW = 1.5  # times the median
FEWEST = 20  # steps of a kind: with fewer, the median is uncertain


class CollectorPauses:
    """The duration of each collection of Python's garbage collector, in milliseconds, by generation."""

    def __init__(self) -> None:
        self.pauses_ms: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        """Called by the collector at the start and the end of a collection."""
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.pauses_ms[info["generation"]].append((time.perf_counter() - self._started) * 1e3)

    def close(self) -> dict[str, dict[str, float]]:
        """Stop measuring. Returns the number of collections of each generation, and the longest one."""
        gc.callbacks.remove(self._note)
        return {str(g): {"count": len(found), "max_ms": max(found, default=0.0)} for g, found in self.pauses_ms.items()}


def steady(executor: Executor, rows: int, isl: int, osl: int, seconds: float) -> dict[str, Any]:
    """Keep `rows` sequences running for some seconds. Their first lengths differ, so that they end one after the other."""
    mailbox, vocab = executor.mailbox, executor.info.vocab_size
    assert isinstance(mailbox, SynchronousMailbox)
    for row in range(rows):
        mailbox.submit(random_requests(1, isl, max(osl * (row + 1) // rows, 2), vocab, seed=1000 + row))
    seeds = itertools.count(10_000)
    first = executor.step_history.num_steps
    steps: dict[int, list[tuple[float, float]]] = {}  # (end, duration in milliseconds) of steps of all rows, by tokens
    pauses, started, warm_up = CollectorPauses(), time.monotonic(), 2.0
    while (elapsed := time.monotonic() - started) < seconds + warm_up:
        for _ in range(256):
            executor.turn(0.0)
            for output in mailbox.pop_outputs():
                if output.finish_reason is not None:
                    mailbox.submit(random_requests(1, isl, osl, vocab, seed=next(seeds)))
        for step in executor.step_history.steps(first):
            if elapsed > warm_up and step.rows == rows:
                steps.setdefault(step.tokens, []).append((step.end_s - started, step.duration_s * 1e3))
        first = executor.step_history.num_steps
    found = pauses.close()
    mixed = {str(tokens): slowest(times) for tokens, times in sorted(steps.items()) if tokens > rows and len(times) >= FEWEST}
    return {
        "rows": rows, "isl": isl, "osl": osl, "seconds": seconds, "decodes": slowest(steps[rows]), "steps_with_prompts": mixed,
        "other_steps": sum(len(times) for times in steps.values() if len(times) < FEWEST), "collections": found,
    }  # fmt: skip


def slowest(steps: list[tuple[float, float]]) -> dict[str, Any]:
    """The times of the steps of a kind, (end, ms) each, and those that are slow compared with the median of the steps around them."""
    times_ms = [duration for _, duration in steps]
    ratios = [value / statistics.median(times_ms[max(i - NEIGHBOURS, 0) : i + NEIGHBOURS]) for i, value in enumerate(times_ms)]
    slow = [{"second": round(end, 3), "ms": ms, "by_median": ratio} for (end, ms), ratio in zip(steps, ratios, strict=True) if ratio > SLOW]
    return {
        "steps": len(times_ms), "median_ms": statistics.median(times_ms), "p99_ms": sorted(times_ms)[int(len(times_ms) * 0.99)],
        "max_ms": max(times_ms), "max_by_median": max(ratios), "slow_steps": len(slow), "slowest": slow[:100],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--quantize")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lengths", default="128/512", help="tokens of a prompt and of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each run")
    parser.add_argument("--only-frozen", action="store_true", help="leave out the run without freeze_objects")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.configure("WARNING")
    isl, osl = map(int, args.lengths.split("/"))
    limits = Limits(max_batch_size=args.rows, max_input_len=isl, max_output_len=osl, max_num_tokens=8192)
    results: dict[str, Any] = {**provenance(device="cuda"), "config": args.config, "quantization": args.quantize, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        config = BuildConfig(dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=args.quantize)
        build(args.config, folder + "/engine", config, verify="none", kernels=compile_kernels)
        executor = load_executor(folder + "/engine", RuntimeConfig(prefix_reuse=False), SynchronousMailbox)
        executor.capture_all()
        run_batch(executor, random_requests(args.rows, isl, 64, executor.info.vocab_size, seed=1), 64)
        for frozen in (True,) if args.only_frozen else (False, True):
            if frozen:
                while executor.is_busy:
                    executor.turn(0.0)
                executor.mailbox.pop_outputs()  # type: ignore[attr-defined]
                freeze_objects()
            run = {"frozen": frozen, "objects": len(gc.get_objects()), **steady(executor, args.rows, isl, osl, args.seconds)}
            results["runs"].append(run)
            print(run, flush=True)
        executor.close()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
