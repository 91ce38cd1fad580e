"""Measures tiles of the experts' kernel on one CUDA device: tokens of a tile, weight rows, features, warps and stages of the pipeline.

    python benchmarks/kernels/expert_tiles.py --form fp4 --seconds 105 --json results.json

Shapes are those of gpt-oss-20b and Qwen3-30B-A3B, formats MXFP4, FP8 with a scale per row, and bfloat16, for up to 896 rows of a decode
step. Kernels are compiled in a pool of processes, while those that are ready are measured. A time is the median of replays of a CUDA graph
of four calls with different routings, which read two copies of the weights in turn. Each result is compared with the float64 product of the
dequantized weights. Up projections have gates. 2,048 rows are those of a prompt, for which others use the GEMM for many rows. `rule` is
what the launcher chooses. The script ends after `--seconds`, with what it has; each projection has the same share of this time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from fp4 import EXPERTS, READ_RATE
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import moe as reference
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.gemm.quantized.int4 import prepare_weight
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.triton.moe import router
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import ClippedGate
from stoker.profiling.tile_tuning import time_graph

ROWS = {"fp4": (1, 8, 16, 64, 128, 256, 448, 2048), "fp8": (64, 128, 256, 448, 896), "bf16": (64, 128, 256, 448, 896)}
GATES = {"gpt-oss-20b": ClippedGate(7.0, 1.702), "qwen3-30b-a3b": "silu"}
SMALL_ROWS = 8  # up to which split-K is measured
MAX_PADDING = 1.03  # features that are multiplied, per feature of the weight
BEST = 5  # tiles that are printed
MAX_SHARED = 227 << 10  # bytes per CTA
MAX_SUMS = 128  # per thread
MAX_ERROR = {"fp4": 0.02, "bf16": 0.02, "fp8": 0.06}  # of the largest exact value; FP8 rounds the activations, too


@dataclass(frozen=True, slots=True)
class Projection:
    """The up or the down projection of a model's experts in a format."""

    model: str
    form: str
    is_down: bool

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that are measured."""
        return ROWS[self.form]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, output features, input features)."""
        experts, _, hidden, size = EXPERTS[self.model]
        return (experts, hidden, size) if self.is_down else (experts, 2 * size, hidden)

    def candidates(self) -> Iterator[tuple[int, QuantTile]]:
        """(tokens of a tile, tile) that are measured."""
        k, is_fp4 = self.shape[2], self.form == "fp4"
        element = {"fp4": 0.5, "fp8": 1, "bf16": 2}[self.form]
        blocks_k = {"fp4": (128, 64, 192, 256), "fp8": (128, 256), "bf16": (64, 128)}[self.form]
        # Weight rows and warps. A matrix instruction of four warps has 64 rows, of FP4 one row of each of 64 pairs.
        shapes = [(128, 4), (256, 8), (256, 4)] if is_fp4 else [(64, 4), (128, 8), (128, 4)]
        all_tokens = (16, 8, 32, 64, 128) if is_fp4 else (16, 32, 64, 128)
        for stages, tokens, block_k, (block_n, warps) in itertools.product((4, 3, 6), all_tokens, blocks_k, shapes):
            stage_bytes = block_k * (block_n * element + tokens * (1 if self.form == "fp8" else 2))
            if (
                -(-k // block_k) * block_k <= (MAX_PADDING if is_fp4 else 1) * k
                and stages * stage_bytes <= MAX_SHARED
                and block_n * tokens <= MAX_SUMS * 32 * warps
                and (not is_fp4 or stages < 6 or (tokens <= 16 and block_n == 128))
                and (not is_fp4 or block_k < 192 or (tokens <= 32 and k % 128 == (64 if block_k == 192 else 0)))
            ):
                for splits in (1, 2, 4) if is_fp4 and tokens == 8 and k // (4 * block_k) >= 3 else (1,):
                    yield tokens, QuantTile(block_n, block_k, splits, warps, stages)

    def project(self, x: Tensor, weight: PackedWeight, routing: Routing, tokens: int | None, tile: QuantTile | None) -> Tensor:
        """The projection of x by the launcher, which chooses `tokens` or `tile` where they are None."""
        if self.is_down:
            return moe.expert_down(x, weight, routing, tile=tile, tokens=tokens)
        return moe.expert_up(x, weight, routing, GATES[self.model], tile, tokens)

    def weight(self, device: str) -> tuple[PackedWeight, Tensor | None]:
        """(the weight as the kernel reads it, its values in float64 unless the device is meta)."""
        experts, n, k = self.shape
        if self.form == "fp4":
            values = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=device)
            scale = torch.empty(experts, n, k // 32, dtype=torch.bfloat16, device=device)
            if device != "meta":
                values.random_(0, 256)
                scale.copy_(torch.randint(-9, -5, scale.shape, device=device).float().exp2())
            stored = PackedWeight("int4", values, scale, None, 32, is_fp4=True)
            return prepare_weight(stored), None if device == "meta" else dequantize_int4(stored, torch.float64)
        dense = torch.empty(experts, n, k, dtype=torch.bfloat16, device=device)
        if device != "meta":
            dense.normal_(0, 0.02)
        if self.form == "bf16":
            return PackedWeight("dense", dense), None if device == "meta" else dense.double()
        scale = torch.full((experts, n), 0.1 / 448, dtype=torch.float32, device=device)
        values = dense.mul_(4480).clamp_(-448, 448).to(torch.float8_e4m3fn)
        exact = None if device == "meta" else values.double() * (0.1 / 448)
        return PackedWeight("fp8", values, scale, activations="token"), exact


def projections() -> list[Projection]:
    """What is measured, in this order."""
    pairs = [("gpt-oss-20b", "fp4"), ("qwen3-30b-a3b", "fp4"), ("qwen3-30b-a3b", "fp8"), ("qwen3-30b-a3b", "bf16"), ("gpt-oss-20b", "bf16")]
    return [Projection(model, form, is_down) for model, form in pairs for is_down in (False, True)]


def compile_candidate(projection: Projection, tokens: int, tile: QuantTile) -> str | None:
    """Compile one kernel into Triton's cache. Returns why it cannot be compiled, or None."""
    experts, top_k, _, _ = EXPERTS[projection.model]
    rows = 64
    order, offsets = (torch.empty(count, dtype=torch.int32, device="meta") for count in (rows * top_k, experts + 1))
    routing = Routing(torch.empty(rows, top_k, device="meta"), order, offsets)
    x = torch.empty(rows * (top_k if projection.is_down else 1), projection.shape[2], dtype=torch.bfloat16, device="meta")
    try:
        with compiling(90):
            projection.project(x, projection.weight("meta")[0], routing, tokens, tile)
    except Exception as problem:
        return f"{problem!r:.200}"
    return None


def is_sensible(tokens: int, mean: float) -> bool:
    """Whether tiles of this number of tokens are measured for `mean` rows per expert."""
    return min(mean / 2, 128) <= tokens <= max(16, 4 * mean)


def measure(projection: Projection, compiled: dict[Future[str | None], tuple[int, QuantTile]], deadline: float) -> Iterator[dict[str, Any]]:
    """The results of all candidates that are compiled before `deadline`, monotonic seconds, and then of the launcher's choices."""
    experts, top_k, _, _ = EXPERTS[projection.model]
    weight, exact_weight = projection.weight("cuda")
    copies = [weight, replace(weight, values=weight.values.clone())]
    cases = {}
    for rows in projection.rows:
        routings = [router.route(torch.randn(rows, experts, device="cuda"), None, RoutingParams(top_k)) for _ in range(4)]
        x = torch.randn(rows * (top_k if projection.is_down else 1), projection.shape[2], device="cuda").bfloat16()
        exact_experts = PackedWeight("dense", exact_weight)
        if projection.is_down:
            exact = reference.expert_down(x.double(), exact_experts, routings[0])
        else:
            exact = reference.expert_up(x.double(), exact_experts, routings[0], GATES[projection.model])
        used = sum(int((r.offsets.diff() > 0).sum()) for r in routings) / 4
        cases[rows] = routings, x, exact, used * weight.num_bytes / experts / READ_RATE
    del exact_weight

    def result(rows: int, tokens: int | None, tile: QuantTile | None) -> dict[str, Any]:
        routings, x, exact, floor = cases[rows]
        found = {"model": projection.model, "form": projection.form, "down": projection.is_down, "rows": rows, "tokens": tokens or "rule"}
        if tile is not None:
            found["tile"] = astuple(tile)[:5]  # weight rows, features, splits, warps, stages
        try:
            difference = projection.project(x, weight, routings[0], tokens, tile).double() - exact
            error = float(difference.abs().max() / exact.abs().max())
            if not error < MAX_ERROR[projection.form]:
                return {**found, "wrong": error}
            calls = list(zip(routings, itertools.cycle(copies)))
            us = time_graph(lambda: [projection.project(x, w, r, tokens, tile) for r, w in calls]) / len(calls)
        except RuntimeError as problem:  # resources of the device
            return {**found, "problem": f"{problem!r:.120}"}
        return {**found, "us": round(us, 2), "floor": round(floor, 1), "error": round(error, 5)}

    for future, (tokens, tile) in compiled.items():
        if time.monotonic() > deadline:
            break
        if (problem := future.result()) is not None:
            yield {"model": projection.model, "form": projection.form, "tokens": tokens, "tile": astuple(tile)[:5], "problem": problem}
            continue
        for rows in projection.rows:
            if is_sensible(tokens, rows * top_k / experts) and (tile.splits == 1 or rows <= SMALL_ROWS):
                yield result(rows, tokens, tile)
    for rows in projection.rows:  # after the candidates, among which its kernels are
        yield result(rows, None, None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", help="write the results to this file")
    options.add_argument("--seconds", type=float, default=600, help="after which no other kernel is measured")
    options.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="processes that compile")
    options.add_argument("--compile-only", action="store_true", help="only compile the kernels, on a machine that may have no device")
    options.add_argument("--form", choices=ROWS, help="measure only this format")
    options.add_argument("--model", choices=EXPERTS, help="measure only this model")
    chosen = options.parse_args()
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(chosen.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        wanted = [p for p in projections() if chosen.form in (None, p.form) and chosen.model in (None, p.model)]
        work = {p: {pool.submit(compile_candidate, p, *candidate): candidate for candidate in p.candidates()} for p in wanted}
        for number, (projection, compiled) in enumerate(work.items(), 1):
            if chosen.compile_only:
                problems = [problem for future in compiled if (problem := future.result()) is not None]
                print(f"{time.monotonic() - began:.0f} s: {projection}, {len(compiled)} kernels; problems: {problems}", flush=True)
                continue
            if time.monotonic() > began + chosen.seconds:
                break
            torch.manual_seed(0)
            found = list(measure(projection, compiled, began + chosen.seconds * number / len(work)))
            results += found
            print(f"{time.monotonic() - began:.0f} s: {projection}, {len(compiled)} kernels", flush=True)
            for rows in projection.rows:
                timed = [one for one in found if one.get("rows") == rows and "us" in one]
                *tiles, rule = timed
                best = [f"{one['us']} {one['tokens']}×{one['tile']}" for one in sorted(tiles, key=lambda one: one["us"])[:BEST]]
                print(f"  {rows} rows: floor {rule['floor']}, {len(tiles)} tiles, rule {rule['us']}, best {', '.join(best)}", flush=True)
            if chosen.json:
                with open(chosen.json, "w", encoding="utf-8") as file:
                    json.dump({**provenance(device="cuda"), "results": results}, file)
        pool.shutdown(cancel_futures=True)
    if wrong := [one for one in results if "wrong" in one]:
        raise SystemExit(f"wrong results: {wrong}")


if __name__ == "__main__":
    main()
