"""Tunes the tiles of linears inside a captured decode step.

    PYTHONPATH=src python benchmarks/kernels/step_tiles.py --config benchmarks/models/llama-3.1-8b --quantize FP8_KV --rows 1,8

The best tile when one linear runs repeatedly (`skinny.py`) can differ from the best tile in a step, where the previous kernel
decides when and on which SMs its CTAs start. Linears are tuned one after another; then the best tiles of each are measured once more.
`--ranks N` uses the shapes of one of N tensor-parallel ranks, without all-reduces. `--layers` limits the number of layers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import skinny as skinny_benchmark
import step
import torch
from skinny import Case, make
from torch import Tensor

from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.gemm.dense import launch as linear
from stoker.kernels.triton.gemm.quantized import fp8 as quant_fp8
from stoker.kernels.triton.gemm.quantized import fp8_gemv as quant_gemv
from stoker.kernels.triton.gemm.quantized.fp8_gemv import GemvTile
from stoker.kernels.triton.gemm.skinny import launch as skinny
from stoker.kernels.triton.gemm.skinny.launch import CHUNK_BYTES
from stoker.kernels.tuning.table import TuningTable
from stoker.kernels.tuning.tiles import LinearTile, SkinnyTile
from stoker.kernels.types import Fusion
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.executor import Executor
from stoker.runtime.load import load_executor
from stoker.runtime.worker.cuda_graphs import Graphs

Tile = SkinnyTile | LinearTile | GemvTile
Key = tuple[int, int, bool]  # rows of a part; features of a dense weight, chunks of a streamed one; gated
FORMS = {"none": "dense", "FP8_KV": "fp8", "FP8": "fp8", "WEIGHTS_ONLY_INT8": "int8", "AWQ": "int4/128", "WEIGHTS_ONLY_INT4": "int4/32"}
SECOND_ROUND_TILES = 4  # per linear
MAX_CTAS = 1600


@dataclass(frozen=True)
class Linear:
    """A linear of the model in its format, for a number of rows."""

    name: str
    n: int
    k: int
    form: str
    rows: int

    @property
    def gated(self) -> bool:
        return self.name == "up"

    @property
    def fuses_norm(self) -> bool:
        return self.name in ("qkv", "up")

    @property
    def case(self) -> Case:
        """The same for `skinny.py`."""
        form, _, group = self.form.partition("/")
        parts = ("n" if self.fuses_norm else "r") + ("g" if self.gated else "")
        return Case(form, int(group or 0), self.name, self.n, self.k, parts, self.rows, False)

    @property
    def key(self) -> Key:
        return self.n, self.k if self.form == "dense" else self.case.chunks, self.gated

    def tiles(self) -> Iterator[Tile]:
        """The tiles to measure."""
        if self.form == "dense":
            yield from self.gemv_tiles() if self.rows == 1 else self.dense_tiles()
            return
        case = self.case
        for m_tiles, warps, splits, stages in itertools.product((1, 2, 4), (4, 8), (1, 2, 4), (1, 2, 4)):
            ctas = -(-self.n // (16 * m_tiles // (2 if self.gated else 1))) * splits
            iterations = -(-case.chunks // (warps * splits))
            registers = m_tiles * stages * max(1, case.group // 64) * (1 if case.group != 32 else 2)
            if registers <= 8 and iterations >= stages and (m_tiles > 1 or not self.gated) and 60 <= ctas <= MAX_CTAS:
                yield SkinnyTile(m_tiles, splits, warps, stages)
        if self.form == "fp8" and self.rows == 1 and not self.gated and self.k <= quant_gemv.MAX_FEATURES:
            for block_n, warps in itertools.product((4, 8, 16, 32), (2, 4, 8)):
                yield GemvTile(block_n, warps)

    def gemv_tiles(self) -> Iterator[LinearTile]:
        for block_n, block_k, warps, stages in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (2, 4, 8), (1, 3)):
            weights = block_n * block_k * (2 if self.gated else 1) // (32 * warps)  # per thread
            if 16 <= weights <= 64 and 250 <= self.n // block_n <= 8192:
                yield LinearTile(block_n, block_k, 1, warps, stages)

    def dense_tiles(self) -> Iterator[LinearTile]:
        side = max(16, self.rows)
        for block_n, block_k, splits, stages in itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 4), (2, 3, 4, 6)):
            lines = block_n * (2 if self.gated else 1)
            shared = stages * block_k * 2 * (lines + side)
            ctas = -(-self.n // block_n) * splits
            if 40_000 <= shared <= 220_000 and 120 <= ctas <= 1000 and self.k // (splits * block_k) >= stages:
                yield LinearTile(block_n, block_k, splits, 8 if lines > 128 else 4, stages, self.rows <= 16 and not self.fuses_norm)


chosen: dict[Key, Tile] = {}  # the tiles that are measured now
_rules = (skinny.skinny_tile, linear.linear_tile, quant_gemv.gemv_tile)


def _skinny_tile(form: str, tokens: int, n: int, chunks: int, gated: bool, num_sms: int, tuning: TuningTable) -> SkinnyTile:
    tile = chosen.get((n, chunks, gated))
    return tile if isinstance(tile, SkinnyTile) else _rules[0](form, tokens, n, chunks, gated, num_sms, tuning)


def _linear_tile(rows: int, n: int, k: int, gated: bool, itemsize: int, num_sms: int, tuning: TuningTable) -> LinearTile:
    tile = chosen.get((n, k, gated))
    return tile if isinstance(tile, LinearTile) else _rules[1](rows, n, k, gated, itemsize, num_sms, tuning)


def _gemv_tile(x: Tensor, weight: PackedWeight, fusion: Fusion) -> GemvTile | None:
    n, k = weight.values.shape
    tile = chosen.get((n, k // CHUNK_BYTES, False)) if fusion.gate is None else None
    return _rules[2](x, weight, fusion) if tile is None else tile if isinstance(tile, GemvTile) else None


def compile_tile(job: tuple[Linear, Tile]) -> None:
    one, tile = job
    if isinstance(tile, SkinnyTile):
        skinny_benchmark.compile_tile((one.case, tile))
        return
    x, fusion, rows = make("meta", one.rows, one.k), one.case.fusion("meta"), one.n * (2 if one.gated else 1)
    with compiling():
        if isinstance(tile, LinearTile):
            linear.small_linear(x, make("meta", rows, one.k), None, fusion, tile)
        else:
            values, scale = make("meta", rows, one.k, dtype=torch.float8_e4m3fn), make("meta", rows, dtype=torch.float32)
            quant_gemv.fp8_gemv(x, PackedWeight("fp8", values, scale, activations="token"), fusion, tile)


def shapes(config: dict[str, Any], form: str, rows: int) -> list[Linear]:
    hidden, size, heads, kv_heads = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    head = config.get("head_dim") or hidden // heads
    dims = {"qkv": ((heads + 2 * kv_heads) * head, hidden), "out": (hidden, heads * head), "up": (size, hidden), "down": (hidden, size)}
    return [Linear(name, n, k, form, rows) for name, (n, k) in dims.items()]


def tune(executor: Executor, linears: list[Linear], context: int) -> dict[str, Any]:
    def timed(times: int) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return min(step.measure(executor, linears[0].rows, context, False)["ms"] for _ in range(times))

    chosen.clear()
    before = best = timed(3)
    seen: dict[str, dict[Tile, float]] = {}
    for round_number in range(2):
        for one in linears:
            best_tile, times = chosen.get(one.key), {}
            tiles = list(one.tiles()) if round_number == 0 else sorted(seen[one.name], key=lambda t: seen[one.name][t])[:SECOND_ROUND_TILES]
            for tile in tiles:
                chosen[one.key] = tile
                try:
                    times[tile] = timed(1 + 2 * round_number)
                except Exception as error:
                    print(f"{one.name} {tile}: {error}"[:200], flush=True)
            if times and min(times.values()) < best * (0.999 if round_number == 0 else 1.0):
                best_tile = min(times, key=lambda t: times[t])
                best = times[best_tile]
            chosen.pop(one.key)
            if best_tile is not None:
                chosen[one.key] = best_tile
            seen[one.name] = times
            ranked = [f"{type(t).__name__[0]}{astuple(t)} {times[t]:.3f}" for t in sorted(times, key=lambda t: times[t])[:5]]
            print(f"rows {one.rows} {one.name} ({one.n}, {one.k}): {best:.3f} ms with {best_tile}; {'; '.join(ranked)}", flush=True)
    for one in linears:
        print(f"  {one.form} {one.case.token_tiles} {one.key}: {chosen.get(one.key)}", flush=True)
    print(f"rows {linears[0].rows}: {before:.3f} → {best:.3f} ms", flush=True)
    tiles = {one.name: {"key": one.key, "tile": repr(chosen.get(one.key))} for one in linears}
    return {"rows": linears[0].rows, "context": context, "before_ms": before, "ms": best, "tiles": tiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--quantize", default="none", choices=FORMS)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = json.loads(Path(args.config, "config.json").read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        config[key] //= args.ranks
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    all_rows, form = [int(r) for r in args.rows.split(",")], FORMS[args.quantize]
    began = time.monotonic()
    jobs = [(one, tile) for rows in all_rows for one in shapes(config, form, rows) for tile in one.tiles()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, jobs, chunksize=2))
    print(f"{len(jobs)} tiles compiled in {time.monotonic() - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        limits = Limits(max_batch_size=max(all_rows), max_input_len=4096, max_output_len=4096)
        quantization = None if args.quantize == "none" else args.quantize
        built = BuildConfig(dtype="bfloat16", dummy_weights=True, limits=limits, device="cuda", quantization=quantization)
        build(folder, folder + "/engine", built, verify="none")
        Graphs.warm_up = lambda self: 0  # type: ignore[method-assign]
        executor = load_executor(folder + "/engine", RuntimeConfig(prefix_reuse=False), SynchronousMailbox)
    skinny.skinny_tile, linear.linear_tile, quant_fp8.gemv_tile = _skinny_tile, _linear_tile, _gemv_tile
    print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    for rows in all_rows:
        results.append(tune(executor, shapes(config, form, rows), args.context))
        if args.json:
            found = {**provenance(device="cuda"), "config": args.config, "ranks": args.ranks, "quantize": args.quantize, "results": results}
            Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
