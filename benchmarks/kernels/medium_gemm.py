"""Measures bfloat16 linears of 33 to 1,023 rows on one Hopper GPU, compared with float64: the tiles of the persistent GEMM and what else
computes them.

    PYTHONPATH=src python benchmarks/kernels/medium_gemm.py [--models 8b,70b,attention] [--rows 64,128,448] [--json medium_gemm_bf16.json]

Linears are those of Llama-3.1-8B, of 70B on two ranks, and of the attention of Qwen3-30B-A3B and gpt-oss-20b, each with the norm, gate,
bias and residual that it has in a step. Ways: `library` with separate kernels, `small` (the GEMM for up to 64 rows), and tiles as
block_m/block_n/slices of the last round. `rule` is what `ops.linear` uses. Times are medians of CUDA graph replays in µs, in which weights
rotate, so that L2 does not hold them, and all ways take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from large_gemm import time_in_turn
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.kernels.reference import linear as reference
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.dense import launch as dense
from stoker.kernels.triton.gemm.large.launch import large_gemm
from stoker.kernels.triton.gemm.large.tiles import (
    NARROW_TILE,
    SMALL_GATED_TILE,
    SMALL_TILE,
    TALL_TILE,
    TILE,
    LargeGemmTile,
    count_tiles,
    split_tiles,
)
from stoker.kernels.triton.gemm.quantized.launch import apply_input_fusion
from stoker.kernels.types import Fusion

BF16 = torch.bfloat16
READ_BYTES_PER_US, OPERATIONS_PER_US = 4.42e6, 989.4e6  # of an H200: measured; data sheet
EPS = 1e-5
CHECKED_ROWS = 128
SLICES = (1, 2, 4, 8)  # largest numbers of slices that are measured
SMALL_TILES = [SMALL_TILE, SMALL_GATED_TILE]


@dataclass(frozen=True)
class Case:
    """A linear: `n` outputs of `k` features. `parts`: n: a norm before it; g: gated, n pairs of gate and up; b: a bias; r: a residual."""

    name: str
    n: int
    k: int
    parts: str

    @property
    def gate(self) -> str | None:
        return "silu" if "g" in self.parts else None

    def weight(self, device: str = "cuda") -> Tensor:
        return torch.randn(self.n * (2 if self.gate else 1), self.k, device=device, dtype=BF16) * self.k**-0.5

    def tiles(self, rows: int) -> dict[str, LargeGemmTile]:
        """The tiles that are measured, by name. Each number of slices of the last round is listed once."""
        if rows <= dense.MAX_ROWS:
            shapes = SMALL_TILES
        else:
            shapes = [NARROW_TILE, TILE] if rows <= 128 or self.gate else [NARROW_TILE, TILE, TALL_TILE]
        found: dict[str, LargeGemmTile] = {}
        for shape, limit in itertools.product(shapes, SLICES):
            tile = shape._replace(max_slices=limit)
            _, slices = split_tiles(count_tiles(rows, self.n, tile, self.gate), self.k // 64, tile, num_sms(torch.device("cuda")))
            found.setdefault(f"{tile.block_m}/{tile.block_n}/{slices}", tile)
        return found


MODELS = {
    "8b": [Case("8b qkv", 6144, 4096, "n"), Case("8b out", 4096, 4096, "r"), Case("8b gate_up", 14336, 4096, "ng"),
           Case("8b down", 4096, 14336, "r"), Case("8b head", 128256, 4096, "n")],
    "70b": [Case("70b/2 qkv", 5120, 8192, "n"), Case("70b/2 out", 8192, 4096, ""), Case("70b/2 gate_up", 14336, 8192, "ng"),
            Case("70b/2 down", 8192, 14336, "")],
    "attention": [Case("qwen3 qkv", 5120, 2048, "n"), Case("qwen3 out", 2048, 4096, "r"), Case("gpt-oss qkv", 5120, 2880, "nb"),
                  Case("gpt-oss out", 2880, 4096, "br")],
}  # fmt: skip
ROWS = {
    "8b": "48,64,96,128,192,256,384,448,512,640,768,1000",
    "70b": "64,128,256,448,768",
    "attention": "64,128,448,1000",
}


def own(weight: Tensor, x: Tensor, tile: LargeGemmTile, fusion: Fusion, bias: Tensor | None) -> Tensor:
    """The linear by a tile of the persistent GEMM, with a kernel for its norm."""
    return large_gemm(apply_input_fusion(x, fusion), weight, tile, bias=bias, residual=fusion.residual, gate=fusion.gate)


def measure(case: Case, all_rows: list[int], repeats: int, launches: int) -> Iterator[dict[str, object]]:
    """The times of a case with each number of rows."""
    weights = [case.weight() for _ in range(launches)]
    bias = torch.randn(len(weights[0]), device="cuda", dtype=BF16) if "b" in case.parts else None
    norm_weight = torch.rand(case.k, device="cuda", dtype=BF16)
    wide_weight, wide_bias = weights[0].double(), None if bias is None else bias.double()
    for rows in all_rows:
        x, residual = torch.randn(rows, case.k, device="cuda", dtype=BF16), torch.randn(rows, case.n, device="cuda", dtype=BF16)
        fusion = Fusion(gate=case.gate, residual=residual if "r" in case.parts else None)
        if "n" in case.parts:
            fusion = replace(fusion, norm_kind="rms", norm_weight=norm_weight, norm_eps=EPS)
        ways: dict[str, Callable[[Tensor], Tensor]] = {}
        ways["library"] = partial(_call, dense.library_linear, x, bias, fusion)
        ways["rule"] = partial(_call, dense.linear, x, bias, fusion)
        if rows <= dense.MAX_ROWS:
            ways["small"] = partial(_call, dense.small_linear, x, bias, fusion)
        for name, tile in case.tiles(rows).items():
            ways[name] = partial(own, x=x, tile=tile, fusion=fusion, bias=bias)
        checked = torch.randperm(rows, device="cuda")[:CHECKED_ROWS]
        wide = replace(
            fusion,
            norm_weight=None if fusion.norm_weight is None else norm_weight.double(),
            residual=None if fusion.residual is None else residual[checked].double(),
        )
        exact = reference.linear(x[checked].double(), wide_weight, wide_bias, wide)
        errors = {}
        for name, way in ways.items():
            torch.full((rows, case.n), torch.nan, device="cuda", dtype=BF16)  # freed, and then the memory of the output
            errors[name] = float((way(weights[0])[checked].double() - exact).norm() / exact.norm())
            assert errors[name] < 1e-2, (case, rows, name, errors[name])
        times = time_in_turn(ways, weights, repeats)
        floor = max(2 * rows * weights[0].numel() / OPERATIONS_PER_US, weights[0].nbytes / READ_BYTES_PER_US)
        listed = "  ".join(f"{name} {took:.1f}" for name, took in sorted(times.items(), key=lambda item: item[1]))
        print(f"{case.name:14} M={rows:<4} floor {floor:5.1f}  {listed}  err {max(errors.values()):.1e}", flush=True)
        yield {"linear": case.name, "rows": rows, "n": case.n, "k": case.k, "floor_us": floor, "us": times, "error": errors}


def _call(linear: Callable[..., Tensor], x: Tensor, bias: Tensor | None, fusion: Fusion, weight: Tensor) -> Tensor:
    return linear(x, weight, bias, fusion)


def precompile(cases: list[Case], workers: int) -> None:
    """Compile the kernels of all tiles into Triton's cache, in parallel processes."""
    kinds = {(case.parts.replace("n", "")): case for case in cases}  # sizes do not specialize a kernel
    shapes = [*SMALL_TILES, NARROW_TILE, TILE, TALL_TILE]
    jobs = [
        (case, shape._replace(max_slices=limit))
        for case, shape, limit in itertools.product(kinds.values(), shapes, (1, 2))
        if shape != TALL_TILE or not case.gate
    ]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[Case, LargeGemmTile]) -> None:
    case, tile = job
    rows = 96
    with compiling():
        bias = torch.empty(case.n, dtype=BF16, device="meta") if "b" in case.parts else None
        residual = torch.empty(rows, case.n, dtype=BF16, device="meta") if "r" in case.parts else None
        x = torch.empty(rows, case.k, dtype=BF16, device="meta")
        own(case.weight("meta"), x, tile, Fusion(gate=case.gate, residual=residual), bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", help=f"those of {ROWS} by default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=300.0, help="linears that would start later are left out")
    parser.add_argument("--json")
    args = parser.parse_args()
    begin, models = time.monotonic(), args.models.split(",")
    precompile([case for model in models for case in MODELS[model]], os.cpu_count() or 1)
    print(f"compiled in {time.monotonic() - begin:.0f} s", torch.cuda.get_device_name(), flush=True)
    results: list[dict[str, object]] = []
    for model in models:
        rows = [int(each) for each in (args.rows or ROWS[model]).split(",")]
        for case in MODELS[model]:
            if time.monotonic() - begin > args.limit_s:
                print("out of time before", case, flush=True)
                continue
            results += measure(case, rows, args.repeats, args.launches)
            torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**provenance(device="cuda"), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
