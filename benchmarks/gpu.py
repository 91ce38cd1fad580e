"""Measures an engine with dummy weights on this GPU: latency by batch and context, first token, and throughput at maximum load.

PYTHONPATH=src python benchmarks/gpu.py --config benchmarks/models/llama-3.1-8b --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from stoker.base import logging
from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.process import freeze_objects
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.breakdown import min_prefill_steps
from stoker.cli.benchmark.results import provenance
from stoker.kernels.triton.aot.kernel_cache import counts
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.breakdown import break_down
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.aot import compile_kernels
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor


def latency(executor: Executor, batch: int, context: int, steps: int = 128) -> dict[str, float]:
    """Milliseconds per decode step: the difference of two runs whose lengths differ by `steps` output tokens."""
    vocab = executor.info.vocab_size
    run_batch(
        executor, random_requests(batch, context, 2, vocab, seed=1), 2
    )  # warm up all shapes, so that nothing is compiled or captured below
    short = run_batch(executor, random_requests(batch, context, 32, vocab, seed=2), 32)
    long = run_batch(executor, random_requests(batch, context, 32 + steps, vocab, seed=3), 32 + steps)
    turns = sorted(long.turns_s[-steps + 8 : -2])
    return {
        "batch": batch,
        "context": context,
        "step_ms": (long.total_s - short.total_s) / steps * 1e3,
        "median_turn_ms": statistics.median(turns) * 1e3,
        "max_turn_ms": turns[-1] * 1e3,
    }


def ratio_to_median(durations: list[float]) -> dict[str, float]:
    """Median and maximum of steps in milliseconds, and their ratio."""
    median = statistics.median(durations)
    return {"steps": len(durations), "median_ms": median * 1e3, "max_ms": max(durations) * 1e3, "max_by_median": max(durations) / median}


def burst(executor: Executor, count: int, isl: int, osl: int) -> dict[str, object]:
    """Requests that arrive together at an idle executor: the steps of each kind, as the executor measures them."""
    vocab = executor.info.vocab_size
    run_batch(executor, random_requests(count, isl, osl, vocab, seed=60), osl)  # warm up all shapes
    first = executor.step_history.num_steps
    run_batch(executor, random_requests(count, isl, osl, vocab, seed=61), osl)
    steps = list(executor.step_history.steps(first))
    row: dict[str, object] = {"requests": count, "isl": isl, "osl": osl, "all": ratio_to_median([s.duration_s for s in steps])}
    for kind, is_decode in (("decode", True), ("prefill", False)):
        row[kind] = ratio_to_median([s.duration_s for s in steps if s.is_decode is is_decode])
    return row


def gap(executor: Executor, batch: int, context: int, num_steps: int = 32) -> dict[str, object]:
    """The time of each kernel in decode steps, and the idle time of the device between steps."""
    mailbox = executor.mailbox
    assert isinstance(mailbox, SynchronousMailbox)
    length = 2 * num_steps + 16 + min_prefill_steps(executor, batch * context)
    mailbox.submit(random_requests(batch, context, length, executor.info.vocab_size, seed=70))
    executor.turn(0.0)
    while executor.is_busy and (executor.stats.last_step_tokens != batch or executor.stats.last_step_rows != batch):
        executor.turn(0.0)
    for _ in range(6):
        executor.turn(0.0)
    found = break_down(executor, num_steps)
    while executor.is_busy:
        executor.turn(0.0)
    mailbox.pop_outputs()
    return {"batch": batch, "context": context, **msgspec.to_builtins(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize")
    parser.add_argument("--latency", default="1x1000,8x1000,64x1000")
    parser.add_argument("--throughput", default="")
    parser.add_argument("--burst", default="", help="such as 128/64:200 (prompt/output tokens : requests)")
    parser.add_argument("--gap", default="", help="such as 256x1000: idle time between steps, and the time of each kernel")
    parser.add_argument("--max-batch", type=int, default=1024)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--kv-cache-fraction", type=float, help="fraction of the free memory for the KV cache")
    parser.add_argument("--no-kernels", action="store_true", help="compile kernels at the start instead of in the build")
    parser.add_argument("--json")
    args = parser.parse_args()
    logging.configure("INFO")
    mapping = Mapping(tensor_parallel=args.tensor_parallel, pipeline_parallel=args.pipeline_parallel, expert_parallel=args.expert_parallel)
    results: dict[str, object] = {
        **provenance(device="cuda"),
        "config": args.config,
        "tensor_parallel": mapping.tensor_parallel,
        "pipeline_parallel": mapping.pipeline_parallel,
        "kv_cache_fraction": args.kv_cache_fraction,
    }
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(max_batch_size=args.max_batch, max_input_len=args.max_len, max_output_len=args.max_len, max_num_tokens=8192)
        started = time.time()
        build(
            args.config,
            folder + "/engine",
            BuildConfig(dtype=args.dtype, dummy_weights=True, limits=limits, device="cuda", quantization=args.quantize, mapping=mapping),
            verify="none",
            kernels=None if args.no_kernels else compile_kernels,
        )
        print(f"build {time.time() - started:.1f} s", flush=True)
        started = time.time()
        runtime = RuntimeConfig(prefix_reuse=False, max_queue_size=1 << 20, kv_cache_fraction=args.kv_cache_fraction)
        executor = load_executor(folder + "/engine", runtime, SynchronousMailbox)
        results["ready_s"] = time.time() - started
        print(f"ready after {results['ready_s']:.1f} s; kernels: {counts}", flush=True)
        results["kernels_at_start"] = {"cached": counts.cached, "compiled": counts.compiled}
        executor.capture_all()
        freeze_objects()  # as the executor of a server does
        vocab = executor.info.vocab_size
        run_batch(executor, random_requests(8, 128, 16, vocab, seed=9), 16)
        results["latency"] = []
        for item in filter(None, args.latency.split(",")):
            batch, context = map(int, item.split("x"))
            row = latency(executor, batch, context)
            results["latency"].append(row)  # type: ignore[attr-defined]
            print(row, flush=True)
        firsts = [run_batch(executor, random_requests(1, 128, 1, vocab, seed=20 + i), 1).total_s for i in range(7)]
        results["first_token_128_ms"] = statistics.median(firsts) * 1e3
        print(f"first token of a prompt of 128: {results['first_token_128_ms']:.2f} ms", flush=True)
        results["gap"], results["burst"] = [], []
        for item in filter(None, args.gap.split(",")):
            batch, context = map(int, item.split("x"))
            found = gap(executor, batch, context)
            results["gap"].append(found)  # type: ignore[attr-defined]
            print({name: value for name, value in found.items() if name != "kernels"}, flush=True)
            for kernel in found["kernels"][:14]:  # type: ignore[index]
                print("   ", kernel, flush=True)
        for item in filter(None, args.burst.split(",")):
            lengths, count = item.split(":")
            row = burst(executor, int(count), *map(int, lengths.split("/")))
            results["burst"].append(row)  # type: ignore[attr-defined]
            print(row, flush=True)
        results["throughput"] = []
        for item in filter(None, args.throughput.split(",")):
            lengths, count = item.split(":")
            isl, osl = map(int, lengths.split("/"))
            result = run_batch(executor, random_requests(int(count), isl, osl, vocab, seed=40), osl)
            row = {
                "isl": isl,
                "osl": osl,
                "requests": int(count),
                "output_tokens_per_s": result.output_tokens_per_s,
                "total_s": result.total_s,
            }
            results["throughput"].append(row)  # type: ignore[attr-defined]
            print(row, flush=True)
        print(f"kernels since the start: {counts}", flush=True)
        results["kernels_at_end"] = {"cached": counts.cached, "compiled": counts.compiled}
        executor.close()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
