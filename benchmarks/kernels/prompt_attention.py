"""Measures the two kernels of prompt attention on one CUDA device, in turn: the tiles of Triton and the warp-specialized kernel.

    PYTHONPATH=src python benchmarks/kernels/prompt_attention.py [--caches e4m3-mean] [--json FILE]

Both kernels are called directly, whatever the launcher would select, over a 16-bit cache, an e4m3 cache, and an e4m3 cache of keys that are
stored less their means, as engines with `FP8_KV` have it. The floor of a shape is the time of its multiply-adds at 790 TFLOP/s. Errors are
relative to float64, of new ragged rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from attention import BF16, FP8, HEADS, MATRIX_CEILING, PARAMS, SIZE, Problem, problem, relative_error

from stoker.cli.benchmark.results import provenance
from stoker.kernels.triton.attention import launch as kernels
from stoker.kernels.triton.attention.tiles import Splits
from stoker.kernels.triton.attention.warp_specialized.launch import warp_specialized_prefill

Launch = Callable[[Problem], None]
Rows = list[tuple[int, int]]  # (queries, keys) of each row

MIX = [(8192, 8192), (2048, 4096), (2048, 2048), (1024, 2048), (1024, 1024), (512, 512), (256, 512), (300, 300), (200, 200), (100, 100)]
SHAPES: dict[str, Rows] = {
    "1 x 8192": [(8192, 8192)],
    "4 x 2048": [(2048, 2048)] * 4,
    "8 x 1024": [(1024, 1024)] * 8,
    "1 x 2048": [(2048, 2048)],
    "1 x 2048 after 6144": [(2048, 8192)],
    "mix": MIX,
}
RAGGED = [(300, 300), (129, 1500), (600, 2700), (65, 1088), (64, 1024)]
CACHES = {"bfloat16": (BF16, False), "e4m3": (FP8, False), "e4m3-mean": (FP8, True)}
LAUNCHES: dict[str, Launch] = {
    "tiles": lambda p: kernels.prefill(p.q, p.cache, p.batch, PARAMS, p.out, splits=Splits()),
    "warp-specialized": lambda p: warp_specialized_prefill(p.q, p.cache, p.batch, PARAMS, p.out),
}


def of_rows(rows: Rows, cache: str) -> Problem:
    lens = [keys for _, keys in rows]
    return problem(lens, [queries for queries, _ in rows], CACHES[cache][0], max(lens), "cuda", has_mean=CACHES[cache][1])


def flops(rows: Rows) -> int:
    """Two operations per multiply-add of the causal part of q·k and p·v."""
    return sum(4 * SIZE * HEADS * queries * (2 * keys - queries + 1) // 2 for queries, keys in rows)


def error(launch: Launch, cache: str) -> float:
    ragged = of_rows(RAGGED, cache)
    launch(ragged)
    torch.cuda.synchronize()
    return relative_error(ragged)


def times_in_turn(problems: list[Problem], rounds: int) -> list[list[float]]:
    """Seconds of a launch of each kernel: graphs of four launches over each problem, replayed one after the other `rounds` times."""
    stream = torch.cuda.Stream()
    graphs = []
    for launch in LAUNCHES.values():
        with torch.cuda.stream(stream):
            launch(problems[0])
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            for each in problems * 4:
                launch(each)
    times: list[list[float]] = [[] for _ in LAUNCHES]
    for _ in range(rounds + 2):
        for graph, measured in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            measured.append(start.elapsed_time(end) / 1e3 / (4 * len(problems)))
    return [measured[2:] for measured in times]


def measure(shape: str, cache: str, rounds: int) -> list[dict[str, object]]:
    rows = SHAPES[shape]
    problems = [of_rows(rows, cache) for _ in range(2)]
    operations = flops(rows)
    floor = operations / MATRIX_CEILING

    results = []
    for name, times in zip(LAUNCHES, times_in_turn(problems, rounds), strict=True):
        median, best = statistics.median(times), min(times)
        row = {"cache": cache, "shape": shape, "kernel": name, "us": median * 1e6, "best_us": best * 1e6}
        row |= {"tflops": operations / median / 1e12, "floor_us": floor * 1e6}
        print(
            f"{cache:10} {shape:20} {name:17} {median * 1e6:8.1f} us (best {best * 1e6:8.1f}) {operations / median / 1e12:6.1f} TFLOP/s"
            f"   floor {floor * 1e6:7.1f} us",
            flush=True,
        )
        results.append(row)
    return results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--caches", default=",".join(CACHES), help="comma-separated: " + ", ".join(CACHES))
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--json", help="write the results to this file")
    chosen = options.parse_args()
    torch.manual_seed(0)
    caches = chosen.caches.split(",")
    errors = [{"cache": cache, "kernel": name, "error": error(launch, cache)} for cache in caches for name, launch in LAUNCHES.items()]
    for row in errors:
        print(f"{row['cache']:10} {row['kernel']:17} error {row['error']:.1e}{'' if row['error'] < 1e-2 else '  WRONG'}", flush=True)
    results = [row for cache in caches for shape in SHAPES for row in measure(shape, cache, chosen.rounds)]
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({**provenance(device="cuda"), "errors": errors, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
