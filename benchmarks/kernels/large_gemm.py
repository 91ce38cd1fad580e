"""Measures the persistent GEMM for many rows on one Hopper GPU, compared with float64 and with the library's GEMM.

    PYTHONPATH=src python benchmarks/kernels/large_gemm.py [--dtypes fp8,bf16] [--rows 1024,2048,8192] [--json large_gemm.json]
    PYTHONPATH=src python benchmarks/kernels/large_gemm.py --medium [--rows 96,128,192,256,384,512,640,768,896] [--json medium_gemm.json]
    PYTHONPATH=src python benchmarks/kernels/large_gemm.py --digits [--rows 129,256,512,768,1024,2048] [--json int8_gemm.json]

Shapes are those of Llama-3.1-8B and 70B on one rank or two. A linear is timed twice: the product alone, and with what a prefill step
computes around it: silu(gate) × up and the quantization for `down` after `gate_up`, the residual after `out` and `down`. Times are medians
of CUDA graph replays, in which inputs rotate and all variants take turns, so that they find the same clock.

--medium measures FP8 linears of 96 to 1,023 rows of 8B, and of 70B on two ranks, with the quantization of their rows before them: the
library, the quantized kernel where its tiles run at the same time (`quantized`), and tiles of this GEMM as block_m/block_n/most slices.
`rule` in the printed line is what `packed_linear` uses.

--digits measures int8 weights with 16-bit rows, with the norm before them: the weight dequantized for the library, the quantized kernel,
and this GEMM with rows as digits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.triton import activation
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.device import num_sms
from stoker.kernels.triton.gemm.large.launch import large_gemm
from stoker.kernels.triton.gemm.large.tiles import NARROW_TILE, SPLIT_TILE, TALL_TILE, TILE, LargeGemmTile, count_tiles, split_tiles
from stoker.kernels.triton.gemm.large.tiles import medium_tile as rule
from stoker.kernels.triton.gemm.quantized import int8
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.gemm.quantized.launch import dequantized_linear, one_round_linear_tile, quantized_activation_linear
from stoker.kernels.triton.gemm.quantized.tiles import digits_tile
from stoker.kernels.types import Fusion

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
PEAK = {"bf16": 989.4, "fp8": 1978.9}  # TFLOP/s, dense, of the data sheet of H100 SXM and H200
MODELS = {  # hidden size, size of q, k and v together, intermediate size
    "8b": (4096, 6144, 14336),
    "70b": (8192, 10240, 28672),
}
MEDIUM_MODELS = [("8b", 1), ("70b", 2)]  # and their ranks
MEDIUM_ROWS = "96,128,192,256,384,512,640,768,896"
DIGIT_ROWS = "129,256,512,768,1024,2048"
DIGIT_SHAPES = {"head": (128256, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}  # of 8B
MEDIUM_TILES = [NARROW_TILE, SPLIT_TILE, TALL_TILE, TILE, *(tile._replace(max_slices=8) for tile in (NARROW_TILE, TALL_TILE, TILE))]
CHECKED_ROWS = 192


@dataclass(frozen=True)
class Case:
    """A linear of a rank: `n` outputs (pairs of gate and up, if gated) of `k` features."""

    name: str
    n: int
    k: int
    gated: bool = False
    residual: bool = False


def cases(models: list[str], ranks: list[int]) -> Iterator[Case]:
    for model in models:
        hidden, qkv, inner = MODELS[model]
        for tp in ranks:
            suffix = f"{model}/tp{tp}"
            yield Case(f"{suffix} qkv", qkv // tp, hidden)
            yield Case(f"{suffix} out", hidden, hidden // tp, residual=tp == 1)
            yield Case(f"{suffix} gate_up", inner // tp, hidden, gated=True)
            yield Case(f"{suffix} down", hidden, inner // tp, residual=tp == 1)


@dataclass(frozen=True)
class Inputs:
    """The operands of one launch. Scales are None in bfloat16."""

    x: Tensor
    weight: Tensor
    residual: Tensor
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    source: Tensor | None = None  # x before its quantization

    @staticmethod
    def random(case: Case, rows: int, dtype: str, device: str = "cuda") -> Inputs:
        x = torch.randn(rows, case.k, device=device, dtype=BF16)
        weight = torch.randn(case.n * (2 if case.gated else 1), case.k, device=device, dtype=BF16) * case.k**-0.5
        residual = torch.randn(rows, case.n, device=device, dtype=BF16)
        if dtype == "bf16":
            return Inputs(x, weight, residual)
        rows_of, weights = quantize_rows(x, "fp8", case.k), quantize_rows(weight, "fp8", case.k)
        return Inputs(rows_of.values, weights.values, residual, rows_of.scale, weights.scale, x)

    @property
    def num_bytes(self) -> int:
        return (self.x.numel() + self.weight.numel()) * self.x.element_size()

    def quantized(self, case: Case) -> Inputs:
        """These inputs after another quantization of `source`."""
        assert self.source is not None
        rows = quantize_rows(self.source, "fp8", case.k)
        return replace(self, x=rows.values, x_scale=rows.scale)

    def by_quantized_kernel(self, case: Case) -> Tensor:
        """The quantization and the product by the kernel for few rows."""
        assert self.source is not None
        return quantized_activation_linear(self.source, self._packed(), "fp8", "fp8", self._fusion(case))

    def has_quantized_tile(self, case: Case) -> bool:
        assert self.source is not None
        return one_round_linear_tile(self.source, self._packed(), "fp8", self._fusion(case)) is not None

    def _packed(self) -> PackedWeight:
        return PackedWeight("fp8", self.weight, self.weight_scale, activations="token")

    def _fusion(self, case: Case) -> Fusion:
        return Fusion(gate="silu" if case.gated else None, residual=self.residual if case.residual else None)

    def own(self, case: Case, tile: LargeGemmTile, fused: bool) -> Tensor:
        y = large_gemm(
            self.x, self.weight, tile, x_scale=self.x_scale, weight_scale=self.weight_scale,
            residual=self.residual if fused and case.residual else None, gate="silu" if fused and case.gated else None,
        )  # fmt: skip
        if fused and case.gated and self.x_scale is not None:
            quantize_rows(y, "fp8", case.n)
        return y

    def library(self, case: Case, fused: bool) -> Tensor:
        """The library's product, with the project's kernels around it."""
        if self.x_scale is None:
            if fused and case.residual:
                return torch.addmm(self.residual, self.x, self.weight.t())
            y = torch.mm(self.x, self.weight.t())
            return activation.gated(y, "silu") if fused and case.gated else y
        assert self.weight_scale is not None
        y = torch._scaled_mm(
            self.x, self.weight.t(), self.x_scale[:, None], self.weight_scale[None, :], out_dtype=BF16, use_fast_accum=True
        )
        if fused and case.gated:
            quantize_rows(y, "fp8", case.n, gate="silu")
        return y.add_(self.residual) if fused and case.residual else y

    def error(self, case: Case, got: Tensor, fused: bool) -> float:
        """‖got − exact‖ ÷ ‖exact‖ of some rows, the last included, compared with float64."""
        rows = torch.randperm(got.shape[0], device="cuda")[:CHECKED_ROWS]
        rows[-1] = got.shape[0] - 1
        x, weight = self.x[rows].double(), self.weight.double()
        if self.x_scale is not None and self.weight_scale is not None:
            x, weight = x * self.x_scale[rows, None], weight * self.weight_scale[:, None]
        want = x @ weight.t()
        if fused and case.gated:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        if fused and case.residual:
            want += self.residual[rows].double()
        return float((got[rows].double() - want).norm() / want.norm())


def precompile(jobs: list[tuple[Case, str, LargeGemmTile]]) -> None:
    """Compile the kernels of `jobs` into Triton's cache, in parallel processes."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[Case, str, LargeGemmTile]) -> None:
    case, dtype, tile = job
    with compiling():
        Inputs.random(case, 128, dtype, "meta").own(case, tile, fused=True)


def time_in_turn(variants: dict[str, Callable[[Inputs], object]], inputs: list[Inputs], repeats: int) -> dict[str, float]:
    """The median time of one launch of each variant in µs: graphs that launch it once for each of `inputs` are replayed in turn."""
    graphs = {}
    for name, launch in variants.items():
        launch(inputs[0])
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for each in inputs:
                launch(each)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / len(inputs))
    return {name: statistics.median(took[1:]) for name, took in times.items()}


def measure(case: Case, rows: int, dtype: str, tiles: list[LargeGemmTile], repeats: int, launches: int) -> dict[str, object]:
    inputs = [Inputs.random(case, rows, dtype) for _ in range(launches)]
    variants: dict[str, Callable[[Inputs], object]] = {}
    errors = {}
    for fused in (False, True) if case.gated or case.residual else (False,):
        for tile in [None, *tiles]:
            key = f"{'library' if tile is None else '/'.join(map(str, tile))}{' fused' if fused else ''}"
            if tile is None:
                variants[key] = lambda each, fused=fused: each.library(case, fused)
            else:
                outputs = case.n * (2 if case.gated and not fused else 1)
                torch.full((rows, outputs), torch.nan, device="cuda", dtype=BF16)  # freed, and then the memory of the output
                got = inputs[0].own(case, tile, fused)
                errors[key] = inputs[0].error(case, got, fused)
                variants[key] = lambda each, fused=fused, tile=tile: each.own(case, tile, fused)
    times = time_in_turn(variants, inputs, repeats)
    work = 2 * rows * case.k * case.n * (2 if case.gated else 1) / 1e6
    result = {
        "linear": case.name, "rows": rows, "dtype": dtype, "n": case.n, "k": case.k, "gated": case.gated,
        "us": times, "tflop_s": {name: work / took for name, took in times.items()}, "error": errors,
    }  # fmt: skip
    for suffix in (" fused", "") if case.gated or case.residual else ("",):
        library = times[f"library{suffix}"]
        own = sorted((took, name) for name, took in times.items() if name.endswith(" fused") == bool(suffix) and "library" not in name)
        print(
            f"{dtype:4} {case.name:16} M={rows:<5}{suffix or ' alone':6} library {library:8.1f} us {work / library:6.0f} TFLOP/s"
            f" ({work / library / PEAK[dtype]:.0%})  "
            + "  ".join(f"{name.removesuffix(' fused')}: {took:.1f} {work / took:.0f} ({library / took:.3f}x)" for took, name in own)
            + f"  err {max(errors.values()):.1e}",
            flush=True,
        )
    return result


def measure_medium(case: Case, rows: int, repeats: int, launches: int) -> dict[str, object]:
    """FP8 with the quantization of the rows: the library, the quantized kernel, and those of `MEDIUM_TILES` that support it."""
    inputs = [Inputs.random(case, rows, "fp8") for _ in range(launches)]
    variants: dict[str, Callable[[Inputs], object]] = {"library": lambda each: each.quantized(case).library(case, True)}
    if inputs[0].has_quantized_tile(case):
        variants["quantized"] = lambda each: each.by_quantized_kernel(case)
    errors, gate = {}, "silu" if case.gated else None
    for tile in MEDIUM_TILES:
        tiles = count_tiles(rows, case.n, tile, gate)
        has_slices = split_tiles(tiles, case.k // 128, tile, num_sms(torch.device("cuda")))[1] > 1
        if has_slices != (tile.max_slices > 1) or (tile.block_m == TALL_TILE.block_m and case.gated):
            continue
        key = name_of(tile)
        torch.full((rows, case.n), torch.nan, device="cuda", dtype=BF16)  # freed, and then the memory of the output
        errors[key] = inputs[0].error(case, inputs[0].own(case, tile, True), True)
        variants[key] = lambda each, tile=tile: each.quantized(case).own(case, tile, True)
    times = time_in_turn(variants, inputs, repeats)
    tile = rule(rows, case.n, case.k, gate, num_sms(torch.device("cuda")))
    chosen = "quantized" if "quantized" in variants else "library" if tile is None else name_of(tile)
    operations = 2e-6 * rows * case.k * case.n * (2 if case.gated else 1) / PEAK["fp8"]
    listed = "  ".join(f"{name} {took:.1f}" for name, took in sorted(times.items(), key=lambda item: item[1]))
    print(f"{case.name:16} M={rows:<4} floor {operations:5.1f}  rule {chosen:9}  {listed}  err {max(errors.values()):.1e}", flush=True)
    return {
        "linear": case.name, "rows": rows, "n": case.n, "k": case.k,
        "rule": chosen, "floor_us": operations, "us": times, "error": errors,
    }  # fmt: skip


def measure_digits(name: str, rows: int, repeats: int, launches: int) -> dict[str, object]:
    """A linear of an int8 weight with the norm before it, in each way that computes it."""
    n, k = DIGIT_SHAPES[name]
    weights = [quantized_weight(n, k) for _ in range(1 if n > 1 << 16 else launches)]  # a head does not fit into L2
    x, norm_weight = torch.randn(rows, k, device="cuda", dtype=BF16), torch.rand(k, device="cuda", dtype=BF16)
    norm = Fusion(norm_kind="rms", norm_weight=norm_weight, norm_eps=1e-5)
    tile = digits_tile(rows, n, num_sms(x.device))
    ways: dict[str, Callable[[PackedWeight], Tensor]] = {
        "library": lambda w: dequantized_linear(x, w, lambda a, b: int8.dequantize_int8(w, a, b, BF16), norm),
        "quantized": lambda w: quantized_activation_linear(x, w, "digits", "int8", norm, tile),
        "large": lambda w: int8.large_int8_linear(x, w, norm),
    }
    first = weights[0]
    assert first.scale is not None
    chosen = torch.randperm(n, device="cuda")[:1024]
    wide = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm_weight.double()
    exact = wide @ (first.values[chosen].double() * first.scale[chosen].double()[:, None]).t()
    errors = {way: float((run(first)[:, chosen].double() - exact).norm() / exact.norm()) for way, run in ways.items()}
    times = time_in_turn(ways, weights, repeats)
    listed = "  ".join(f"{way} {took:.1f}" for way, took in sorted(times.items(), key=lambda item: item[1]))
    work = 2 * rows * n * k / 1e6
    print(f"{name:12} M={rows:<5} {listed}  large {work / times['large']:.0f} TFLOP/s  err {max(errors.values()):.1e}", flush=True)
    return {"linear": name, "rows": rows, "n": n, "k": k, "us": times, "error": errors}


def quantized_weight(n: int, k: int) -> PackedWeight:
    values = torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8)
    return PackedWeight("int8", values, torch.rand(n, device="cuda") * k**-0.5 / 70 + 1e-5)


def name_of(tile: LargeGemmTile) -> str:
    return f"{tile.block_m}/{tile.block_n}/{tile.max_slices}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="fp8,bf16")
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--medium", action="store_true", help="FP8 linears of 96 to 1,023 rows")
    parser.add_argument("--digits", action="store_true", help="int8 weights and 16-bit rows")
    parser.add_argument("--rows", help=f"1024,2048,8192 by default, {MEDIUM_ROWS} with --medium, {DIGIT_ROWS} with --digits")
    parser.add_argument("--tiles", default="128/256/4/16,128/256/4/8", help="comma-separated: block_m/block_n/num_stages/group_m")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=300.0, help="cases that would start later are left out")
    parser.add_argument("--json")
    args = parser.parse_args()
    begin, results = time.monotonic(), []
    if args.medium:
        dtypes, tiles = ["fp8"], MEDIUM_TILES
        listed = [case for model, ranks in MEDIUM_MODELS if model in args.models.split(",") for case in cases([model], [ranks])]
    else:
        dtypes, tiles = args.dtypes.split(","), [LargeGemmTile(*map(int, tile.split("/"))) for tile in args.tiles.split(",")]
        listed = list(cases(args.models.split(","), [int(tp) for tp in args.ranks.split(",")]))
    all_rows = args.rows or (MEDIUM_ROWS if args.medium else DIGIT_ROWS if args.digits else "1024,2048,8192")
    if args.digits:
        listed = []
        for name, rows in itertools.product(DIGIT_SHAPES, [int(rows) for rows in all_rows.split(",")]):
            results.append(measure_digits(name, rows, args.repeats, args.launches))
            torch.cuda.empty_cache()
    kinds = {(case.gated, case.residual): case for case in listed}  # sizes do not specialize a kernel
    jobs = [(case, dtype, tile) for case in kinds.values() for dtype in dtypes for tile in tiles]
    precompile([(case, dtype, tile) for case, dtype, tile in jobs if tile.block_m != TALL_TILE.block_m or not case.gated])
    print(f"compiled in {time.monotonic() - begin:.0f} s", torch.cuda.get_device_name(), flush=True)
    for case, dtype, rows in itertools.product(listed, dtypes, [int(rows) for rows in all_rows.split(",")]):
        if time.monotonic() - begin > args.limit_s:
            print("out of time before", dtype, case, rows, flush=True)
            continue
        if args.medium:
            results.append(measure_medium(case, rows, args.repeats, args.launches))
        else:
            results.append(measure(case, rows, dtype, tiles, args.repeats, args.launches))
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**provenance(device="cuda"), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
