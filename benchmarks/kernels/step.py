"""Measures a decode step: the replay time of its CUDA graph, and the time of each kernel, next to the time of reading all weights.

PYTHONPATH=src python benchmarks/kernels/step.py --config benchmarks/models/llama-3.1-8b --rows 1,8,64 --context 1000 --profile
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.builder.estimate import estimate
from stoker.cli.benchmark.results import provenance
from stoker.kernels.triton.attention import tiles as attention_tuning
from stoker.profiling.captured_step import capture_step, replay_ms
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.profiling.tile_tuning import time_graph
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.worker.cuda_graphs import Graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache", help="auto, int8 or float8_e4m3fn; default: as --quantize selects")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--variants", action="store_true", help="also without PDL, and with other split counts")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [int(r) for r in args.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(max_batch_size=max(rows), max_input_len=args.context + 1024, max_output_len=1024)
        config = BuildConfig(
            dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=args.quantize, kv_cache_dtype=args.kv_cache
        )
        weights = estimate(build(args.config, folder + "/engine", config, verify="none").config).weights
        Graphs.warm_up = lambda self: 0  # type: ignore[method-assign]
        executor = load_executor(folder + "/engine", RuntimeConfig(prefix_reuse=False), SynchronousMailbox)
    results, speed = [], read_speed()
    print(f"weights {weights / 1e9:.2f} GB (read speed {speed / 1e12:.2f} TB/s): {weights / speed * 1e3:.3f} ms", flush=True)
    for count in rows:
        results.append({"rows": count, "context": args.context, **measure(executor, count, args.context, args.profile)})
        if args.variants:
            for name, patch in VARIANTS.items():
                undo = patch()
                print(f"  {name:<24} {measure(executor, count, args.context, False)['ms']:.3f} ms", flush=True)
                undo()
    if args.json:
        with open(args.json, "w") as file:
            what = {
                "config": args.config,
                "quantize": args.quantize,
                "kv_cache": args.kv_cache,
                "weight_bytes": weights,
                "read_bytes_s": speed,
            }
            json.dump({**provenance(device="cuda"), **what, "results": results}, file, indent=1)


def read_speed() -> float:
    """Bytes per second of a reduction of 4 GB, the median of several."""
    x = torch.ones(1 << 30, device="cuda")
    return x.nbytes / time_graph(lambda: x.sum()) * 1e6


@torch.inference_mode()
def measure(executor: Executor, rows: int, context: int, profile: bool) -> dict[str, Any]:
    captured = capture_step(executor, rows, context)
    result: dict[str, Any] = {"ms": replay_ms(captured)}
    print(f"rows {rows} context {context}: {result['ms']:.3f} ms", flush=True)
    if profile:
        result["kernels"] = breakdown(captured.replay)
    return result


def breakdown(work: Callable[[], None], repeats: int = 5) -> dict[str, dict[str, float]]:
    """Per kernel: launches per step, mean µs and µs per step. Kernels overlap with PDL, so that the sum can exceed the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name].append(event.device_time)
    table = {}
    for name, values in sorted(total.items(), key=lambda item: -sum(item[1])):
        count, mean, step = len(values) / repeats, statistics.mean(values), sum(values) / repeats
        table[name[:60]] = {"count": count, "mean_us": mean, "step_us": step}
        print(f"    {name[:60]:<60} {count:6.1f} × {mean:8.2f} us = {step:9.1f} us", flush=True)
    return table


LAUNCHERS = {
    "linear": "gemm.dense.launch",
    "norm": "norm",
    "activation": "activation",
    "embedding": "embedding",
    "rope": "rope",
    "attention": "attention.launch",
    "sampling": "sampling",
}


def without_pdl(*names: str) -> Callable[[], Callable[[], None]]:
    """Launch the kernels of these modules (default: of all) without programmatic dependent launch."""

    def patch() -> Callable[[], None]:
        modules = [importlib.import_module(f"stoker.kernels.triton.{LAUNCHERS[name]}") for name in names or LAUNCHERS]
        originals = [module.pdl_launch_options for module in modules]
        for module in modules:
            module.pdl_launch_options = lambda x: {"USE_PDL": False}

        def undo() -> None:
            for module, original in zip(modules, originals, strict=True):
                module.pdl_launch_options = original

        return undo

    return patch


def with_splits(count: int) -> Callable[[], Callable[[], None]]:
    def patch() -> Callable[[], None]:
        from stoker.kernels.triton.attention import launch as attention

        original = attention.choose_splits
        attention.choose_splits = lambda *a: attention_tuning.Splits(count, 1)  # type: ignore[assignment]
        return lambda: setattr(attention, "choose_splits", original)

    return patch


VARIANTS: dict[str, Callable[[], Callable[[], None]]] = {
    "without PDL": without_pdl(),
    "attention without PDL": without_pdl("attention"),
    "rope without PDL": without_pdl("rope"),
    "attention and rope without PDL": without_pdl("attention", "rope"),
    "linears without PDL": without_pdl("linear"),
    **{f"{n} splits": with_splits(n) for n in (8, 32)},
}

if __name__ == "__main__":
    main()
