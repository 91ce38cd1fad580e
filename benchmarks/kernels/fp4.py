"""Measures linears and experts with FP4 weights (MXFP4) on one CUDA device, next to the other formats that can hold the same values.

    python benchmarks/kernels/fp4.py --json results.json

Linears have the shapes of Llama-3.1-8B, experts those of gpt-oss-20b and Qwen3-30B-A3B. A time is the median of replays of a CUDA graph,
whose calls read different weights (linears) or different experts, so that weights come from memory. `floor` is the time of reading the
weights and scales of all used experts at READ_RATE. Results are compared with the float64 product of the dequantized weights first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels import ops
from stoker.kernels.reference.quant_int4 import dequantize_int4, fp4_as_int8
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.triton.moe import router
from stoker.kernels.types import PLAIN, Fusion
from stoker.profiling.tile_tuning import time_graph

Result = dict[str, Any]
Job = tuple[Any, ...]

READ_RATE = 4.3e6  # bytes per µs of an H200
LINEARS = {"qkv": (6144, 4096, False), "out": (4096, 4096, False), "up": (14336, 4096, True), "down": (4096, 14336, False)}
EXPERTS = {"gpt-oss-20b": (32, 4, 2880, 2880), "qwen3-30b-a3b": (128, 8, 2048, 768)}  # experts, chosen, hidden, size of an expert
FORMS = ("bf16", "int8/32", "fp4")
MIN_BYTES = 160 << 20  # that the calls of a graph read together: more than the L2 cache holds


def fp4(*shape: int) -> PackedWeight:
    """Random FP4 values [..., n, k] in groups of 32, as stored."""
    values = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(-9, -5, (*shape[:-1], shape[-1] // 32), device="cuda").float().exp2().bfloat16()
    return PackedWeight("int4", values, scale, None, 32, is_fp4=True)


def in_form(stored: PackedWeight, form: str) -> PackedWeight:
    """The same weight as the kernels read it in another form."""
    if form == "fp4":
        return ops.prepare_weight(stored)
    if form == "bf16":
        return PackedWeight("dense", dequantize_int4(stored, torch.bfloat16))
    return fp4_as_int8(stored)


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """The time of one of `calls`, which run one after another in a graph."""
    return time_graph(lambda: [call() for call in calls], repeats=15) / len(calls)


def error_of(found: Tensor, exact: Tensor) -> float:
    """The largest difference relative to the largest exact value."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def measure_linear(name: str, rows: int) -> Iterator[Result]:
    n, k, gated = LINEARS[name]
    fusion = Fusion(gate="silu") if gated else PLAIN
    x, stored = torch.randn(rows, k, device="cuda").bfloat16(), fp4(n * (2 if gated else 1), k)
    y = x.double() @ dequantize_int4(stored, torch.float64).T
    exact = torch.nn.functional.silu(y[:, :n]) * y[:, n:] if gated else y
    for form in FORMS:
        if form == "int8/32":
            continue  # an engine on a GPU widens such linears to bfloat16
        weight = in_form(stored, form)
        num_bytes = weight.num_bytes
        copies = [replace(weight, values=weight.values.clone()) for _ in range(1 + MIN_BYTES // num_bytes)]
        error = error_of(ops.packed_linear(x, weight, fusion), exact)
        us = microseconds([lambda w=w: ops.packed_linear(x, w, fusion) for w in copies])  # type: ignore[misc]
        yield result(name, form, rows, us, num_bytes, error)


def routings(rows: int, experts: int, top_k: int) -> list[Routing]:
    """Routings that choose different experts where a step does not need all."""
    count = max(1, min(8, experts // (rows * top_k)))
    found = []
    for i in range(count):
        logits = torch.randn(rows, experts, device="cuda")
        if count > 1:
            first = i * (experts // count)
            logits[:, first : first + experts // count] += 100
        found.append(router.route(logits, None, RoutingParams(top_k)))
    return found


def measure_experts(name: str, rows: int, down: bool) -> Iterator[Result]:
    experts, top_k, hidden, size = EXPERTS[name]
    n, k = (hidden, size) if down else (2 * size, hidden)
    torch.manual_seed(rows)
    stored = fp4(experts, n, k)
    x, routed = torch.randn(rows * (top_k if down else 1), k, device="cuda").bfloat16(), routings(rows, experts, top_k)
    used = sum(int((r.offsets.diff() > 0).sum()) for r in routed) / len(routed)
    project = moe.expert_down if down else moe.expert_up
    plain = in_form(stored, "bf16")
    exact = project(x, plain, routed[0])
    for form in FORMS:
        weight = plain if form == "bf16" else in_form(stored, form)
        error = error_of(project(x, weight, routed[0]), exact.double())
        us = microseconds([lambda r=r, w=weight: project(x, w, r) for r in routed])  # type: ignore[misc]
        yield result(f"{name} {'down' if down else 'up'}", form, rows, us, used * weight.num_bytes / experts, error, used)


def result(what: str, form: str, rows: int, us: float, num_bytes: float, error: float, used: float = 0) -> Result:
    return {"what": what, "form": form, "rows": rows, "us": us, "floor": num_bytes / READ_RATE, "error": error, "experts": used}


def jobs() -> list[Job]:
    linears = [("linear", name, rows) for name in LINEARS for rows in (1, 8, 32, 64, 2048)]
    return [*[("experts", m, r, down) for m in EXPERTS for r in (1, 8, 64, 2048) for down in (False, True)], *linears]


def run(job: Job) -> list[Result]:
    kind, *arguments = job
    return list((measure_linear if kind == "linear" else measure_experts)(*arguments))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", help="write the results to this file")
    options.add_argument("--kind", default="", help="only linear or experts")
    options.add_argument("--compile-only", action="store_true", help="only compile the kernels, for a later run, in several processes")
    options.add_argument("--workers", type=int, default=8, help="processes that compile")
    chosen = options.parse_args()
    todo = [job for job in jobs() if str(job[0]).startswith(chosen.kind)]
    if chosen.compile_only:
        with ProcessPoolExecutor(chosen.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(run, todo))
        return
    results: list[Result] = []
    for job in todo:
        for found in run(job):
            results.append(found)
            print("{what:20} {form:8} {rows:5} rows {us:8.1f} us (floor {floor:.1f})  error {error:.0e}".format(**found), flush=True)
        if chosen.json:
            record = {**provenance(device="cuda"), "results": results}
            with open(chosen.json, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
