"""Skinny GEMMs on one CUDA device: every weight format checked against float64, and timed with each of a choice of tiles.

    PYTHONPATH=src python benchmarks/kernels/skinny.py [--forms int4/128,int4/64,int4/32,int8,fp8] [--rows 1,8,32] [--json FILE]

int4 in small groups with more than 8 tokens runs `gemm.skinny_int4` instead of `gemm.skinny`; with --int4-kernel so do fewer tokens. Shapes
are those of --model, by default Llama-3.1-8B. Times are medians of CUDA graph replays over several copies of the weight, with PDL as in a
step. A line has the best tile, ready for a row of `kernels/tuning/<device>.json`, and the times of the rule's tile and of tiles in shared
memory (`gemm.quantized`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference.linear import around
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.triton import norm
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.device import device_tuning, num_sms
from stoker.kernels.triton.gemm.quantized import fp8 as quant_fp8
from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
from stoker.kernels.triton.gemm.quantized import launch as quant_linear
from stoker.kernels.triton.gemm.quantized.activations import quantize_rows
from stoker.kernels.triton.gemm.skinny.launch import CHUNK_BYTES, skinny_linear
from stoker.kernels.triton.gemm.skinny.tiles import MAX_TOKENS, column_tiles, skinny_tile
from stoker.kernels.triton.gemm.skinny_int4.launch import skinny_int4_linear
from stoker.kernels.triton.gemm.skinny_int4.tiles import MAX_GROUP, skinny_int4_tile, token_tiles
from stoker.kernels.tuning.tiles import SkinnyInt4Tile, SkinnyTile
from stoker.kernels.types import Fusion
from stoker.profiling.tile_tuning import time_graph

READ_TB_S = 4.42  # measured read-only stream of one H200
ROTATED_BYTES = 256 << 20
MODELS = {  # (rows of a part, features, parts: norm, gate, residual)
    "8b": {
        "qkv": (6144, 4096, "n"),
        "out": (4096, 4096, "r"),
        "up": (14336, 4096, "ng"),
        "down": (4096, 14336, "r"),
        "head": (128256, 4096, "n"),
    },
    "70b": {"qkv": (10240, 8192, "n"), "out": (8192, 8192, "r"), "up": (28672, 8192, "ng"), "down": (8192, 28672, "r")},
    "70b/2": {"qkv": (5120, 8192, "n"), "out": (8192, 4096, ""), "up": (14336, 8192, "ng"), "down": (8192, 14336, "")},
    "70b/4": {"qkv": (2560, 8192, "n"), "out": (8192, 2048, ""), "up": (7168, 8192, "ng"), "down": (8192, 7168, "")},
}


@dataclass(frozen=True)
class Case:
    """A linear of a model in a format, for some rows."""

    form: str
    group: int
    name: str
    n: int
    k: int
    parts: str
    rows: int
    int4_kernel: bool  # `gemm.skinny_int4` instead of `gemm.skinny`

    @property
    def chunks(self) -> int:
        if self.form == "int4":
            return self.k // (2 * max(self.group, CHUNK_BYTES))
        return self.k // CHUNK_BYTES

    @property
    def token_tiles(self) -> int:
        if self.int4_kernel:
            return token_tiles(self.rows)
        return column_tiles(self.rows, 1 if self.form == "fp8" else 2)

    def by_rule(self, num_sms: int) -> SkinnyTile | SkinnyInt4Tile:
        if self.int4_kernel:
            return skinny_int4_tile(self.group, self.rows, self.n, self.chunks, self.gated, num_sms, device_tuning(torch.device("cuda", 0)))
        return skinny_tile(self.form, self.rows, self.n, self.chunks, self.gated, num_sms, device_tuning(torch.device("cuda", 0)))

    @property
    def gated(self) -> bool:
        return "g" in self.parts

    @property
    def num_bytes(self) -> int:
        weights = self.n * self.k * (2 if self.gated else 1)
        return weights // 2 + weights // self.group * 2 if self.group else weights

    def fusion(self, device: str) -> Fusion:
        return Fusion(
            "rms" if "n" in self.parts else None,
            make(device, self.k) if "n" in self.parts else None,
            None,
            1e-5,
            "silu" if self.gated else None,
            make(device, self.rows, self.n) if "r" in self.parts else None,
        )

    def weight(self, device: str) -> tuple[PackedWeight, PackedWeight]:
        """(the weight for the kernel, the weight as it is stored)."""
        n, k = self.n * (2 if self.gated else 1), self.k
        if self.form == "int4":
            scale = make(device, n, k // self.group).abs() / (5 * k**0.5)
            zero = integers(device, torch.uint8, 16, n, k // self.group)
            stored = PackedWeight("int4", integers(device, torch.uint8, 256, n, k // 2), scale, zero, self.group)
            return quant_int4.prepare_weight(stored), stored
        scale = (make(device, n, dtype=torch.float32).abs() + 0.5) / (60 * k**0.5)
        if self.form == "int8":
            weight = PackedWeight("int8", integers(device, torch.int8, 127, n, k), scale)
        else:
            weight = PackedWeight("fp8", fp8_values(device, n, k), scale, activations="token")
        return weight, weight

    def run(self, x: Tensor, weight: PackedWeight, fusion: Fusion, tile: SkinnyTile | SkinnyInt4Tile | None) -> Tensor:
        if self.int4_kernel:
            return skinny_int4_linear(x, weight, fusion, tile)  # type: ignore[arg-type]
        return skinny_linear(x, weight, fusion, tile)  # type: ignore[arg-type]

    def tiled(self, x: Tensor, weight: PackedWeight, fusion: Fusion) -> Tensor:
        """The same through tiles in shared memory (of one FP8 row, through its GEMV)."""
        if self.form == "fp8":
            return quant_fp8.packed_linear(x, weight, fusion)
        name = f"int4/{self.group}" if self.group else "int8"
        if self.int4_kernel and self.group:
            return quant_linear.plain_activation_linear(x, weight, fusion)
        return quant_linear.quantized_activation_linear(x, weight, "digits", name, fusion)

    def expected(self, x: Tensor, stored: PackedWeight, fusion: Fusion) -> Tensor:
        """float64, of the first rows of a large weight."""
        if stored.format == "int4":
            real = dequantize_int4(stored, torch.float32).double()
        else:
            assert stored.scale is not None
            real = stored.values.double() * stored.scale.double()[:, None]
        h = x.double()
        if fusion.norm_kind:
            h = norm.norm(x.float(), fusion.norm_weight, None, fusion.norm_eps, "rms").double()
        if self.form == "fp8":
            quantized = quantize_rows(x, "fp8", self.k, norm_weight=fusion.norm_weight, eps=fusion.norm_eps)
            h = quantized.values.double() * quantized.scale.double()[:, None]
        late = replace(fusion, norm_kind=None, residual=None if fusion.residual is None else fusion.residual.double())
        return around(h, late, lambda v: v @ real.T)


def make(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(shape, dtype=dtype, device=device)


def integers(device: str, dtype: torch.dtype, below: int, *shape: int) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randint(0 if dtype == torch.uint8 else -below, below, shape, dtype=dtype, device=device)


def fp8_values(device: str, n: int, k: int) -> Tensor:
    values = make(device, n, k)
    return values.to(torch.float8_e4m3fn) if device == "meta" else (values * 60).clamp(-448, 448).to(torch.float8_e4m3fn)


def tiles(case: Case) -> Iterator[SkinnyTile | SkinnyInt4Tile]:
    """The tiles to measure: those with enough CTAs, work for every warp, and few enough registers per thread."""
    if case.int4_kernel:
        yield from int4_tiles(case)
        return
    for m_tiles, warps, splits, stages in itertools.product((1, 2, 4), (4, 8), (1, 2, 4), (1, 2, 4)):
        ctas = -(-case.n // (16 * m_tiles // (2 if case.gated else 1))) * splits
        iterations = -(-case.chunks // (warps * splits))
        fits = m_tiles * stages * max(1, case.group // 64) <= 8 and iterations >= stages and (m_tiles > 1 or not case.gated)
        if fits and ctas >= 100 and (splits == 1 or ctas * warps <= 6000):
            yield SkinnyTile(m_tiles, splits, warps, stages)


def int4_tiles(case: Case) -> Iterator[SkinnyInt4Tile]:
    words = 16  # registers of a chunk of a tile
    for m_tiles, warps, splits, stages in itertools.product((1, 2), (2, 4), (1, 2, 3, 4, 6, 8, 12, 16), (1, 2)):
        ctas = -(-case.n // (16 * m_tiles * warps // (2 if case.gated else 1))) * splits
        held = m_tiles * (4 * case.token_tiles + words * (stages + 1) // 2 + 16) + 8 * case.token_tiles
        enough = ctas * warps >= 500 and -(-case.chunks // splits) >= 2 * stages and (splits == 1 or ctas * warps <= 4400)
        if held <= 200 and enough and (m_tiles > 1 or not case.gated):
            yield SkinnyInt4Tile(m_tiles, splits, warps, stages)


def compile_tile(job: tuple[Case, SkinnyTile | SkinnyInt4Tile]) -> None:
    case, tile = job
    with compiling():
        weight, _ = case.weight("meta")
        case.run(make("meta", case.rows, case.k), weight, case.fusion("meta"), tile)


def measure(case: Case, fast: bool) -> dict[str, object]:
    copies = max(2, ROTATED_BYTES // case.num_bytes + 1)
    pairs = [case.weight("cuda") for _ in range(copies)]
    weights, x, fusion = [weight for weight, _ in pairs], make("cuda", case.rows, case.k), case.fusion("cuda")
    default = case.by_rule(num_sms(x.device))
    want = case.expected(x, pairs[0][1], fusion)
    del pairs
    errors, times = {}, {}
    for tile in {default, *(() if fast else tiles(case))}:
        got = case.run(x, weights[0], fusion, tile).double()
        errors[tile] = float((got - want).norm() / want.norm())
        if not errors[tile] < 2e-2:
            print(f"WRONG {case} {tile}: {errors[tile]:.2e}", flush=True)
            continue
        times[tile] = time_graph(partial(many, case, x, weights, fusion, tile)) / copies
    row = {"form": f"{case.form}/{case.group}" if case.group else case.form, "linear": case.name, "rows": case.rows}
    if not times:
        return row | {"wrong": True}
    best = min(times, key=lambda tile: times[tile])
    row["tiled_us"] = time_graph(lambda: [case.tiled(x, weight, fusion) for weight in weights]) / copies
    key = (case.group if case.int4_kernel else case.form, case.token_tiles, case.n, case.chunks, case.gated)
    print(
        f"{row['form']:9} {case.name:5} M={case.rows:<3} {times[best]:7.1f} us {case.num_bytes / times[best] / 1e6 / READ_TB_S:6.1%}  "
        f"err {errors[best]:.1e}  rule {times.get(default, 0):6.1f}  tiled {row['tiled_us']:6.1f}  "
        f"{key}: {type(best).__name__}({name_of(best).replace('/', ', ')}),"
        f"  {[f'{name_of(t)} {times[t]:.1f}' for t in sorted(times, key=lambda t: times[t])[1:4]]}",
        flush=True,
    )
    every = {name_of(t): round(us, 2) for t, us in times.items()}
    return row | {"us": times[best], "share": case.num_bytes / times[best] / 1e6 / READ_TB_S, "every": every}


def name_of(tile: SkinnyTile | SkinnyInt4Tile) -> str:
    return f"{tile.m_tiles}/{tile.splits}/{tile.num_warps}/{tile.num_stages}"


def many(case: Case, x: Tensor, weights: list[PackedWeight], fusion: Fusion, tile: SkinnyTile | SkinnyInt4Tile) -> None:
    for weight in weights:
        case.run(x, weight, fusion, tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default="int4/128,int4/64,int4/32,int8,fp8")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--linears", default="qkv,out,up,down,head")
    parser.add_argument("--int4-kernel", action="store_true", help="gemm.skinny_int4 for 8 tokens and fewer, too")
    parser.add_argument("--fast", action="store_true", help="the rule's tiles only")
    parser.add_argument("--json")
    args = parser.parse_args()
    cases = [
        Case(
            form.split("/")[0],
            int(form.split("/")[1]) if "/" in form else 0,
            name,
            *MODELS[args.model][name],
            rows,
            "/" in form and int(form.split("/")[1]) <= MAX_GROUP and (args.int4_kernel or rows > MAX_TOKENS),
        )
        for form in args.forms.split(",")
        for rows in map(int, args.rows.split(","))
        for name in args.linears.split(",")
        if name in MODELS[args.model]
    ]
    began = time.monotonic()
    jobs = {}
    for case in cases:
        for tile in {case.by_rule(132), *(() if args.fast else tiles(case))}:
            key = (
                case.form,
                case.group,
                case.parts,
                case.token_tiles,
                case.int4_kernel,
                tile.m_tiles,
                tile.num_warps,
                tile.num_stages,
                tile.splits > 1,
            )
            jobs.setdefault(key, (case, tile))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, jobs.values(), chunksize=1))
    print(f"{provenance(device='cuda')['device']}: {len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    rows = [measure(case, args.fast) for case in cases]
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**provenance(device="cuda"), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
