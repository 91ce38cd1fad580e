"""Measures quantized linears and experts on one CUDA device with several tiles, compared with float64 and with the read bandwidth.

    PYTHONPATH=src python benchmarks/kernels/quantized.py [--formats fp8,int8,w8a8,int4/128,int4/32,block,moe] [--rows 1,16]
    PYTHONPATH=src python benchmarks/kernels/quantized.py --formats fp8 --model llama-3.1-70b --ranks 2 --rows 16,64

Shapes are those of Llama-3.1-8B, or of one rank of another model, and of three mixtures of experts. Times are medians of CUDA graph
replays over rotating weights. A line prints the best tile for a row of `kernels/tuning/<device>.json`, and the time of the default tile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from stoker.cli.benchmark.results import provenance
from stoker.core.packed_weight import PackedWeight
from stoker.kernels.reference import moe as moe_reference
from stoker.kernels.reference import quant_fp8 as fp8_reference
from stoker.kernels.reference import router as router_reference
from stoker.kernels.reference.linear import around
from stoker.kernels.reference.quant_int4 import dequantize_int4
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.gemm.quantized import fp8 as quant_fp8
from stoker.kernels.triton.gemm.quantized import int4 as quant_int4
from stoker.kernels.triton.gemm.quantized import int8 as quant_int8
from stoker.kernels.triton.gemm.quantized import launch as quant_linear
from stoker.kernels.triton.gemm.quantized.tiles import padded_tokens, quant_tile
from stoker.kernels.triton.moe import launch as moe
from stoker.kernels.triton.moe import router
from stoker.kernels.triton.moe.operands import sorted_rows
from stoker.kernels.tuning.tiles import QuantTile
from stoker.kernels.types import Fusion
from stoker.profiling.tile_tuning import time_graph

READ_TB_S = 4.42  # measured read bandwidth of one H200
ROTATED_BYTES = 256 << 20
FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
WIDENED = "/widened"  # suffix of a format whose quantized values are converted to the dtype of the rows
CODES = {
    "fp8": "fp8",
    "int8": "digits",
    "w8a8": "int8",
    **{f"int4/{group}": "digits" for group in (128, 64, 32)},
    **{f"int4/{group}{WIDENED}": "" for group in (128, 64, 32)},
}
MODELS = {  # hidden size, features of q, k and v, features of all heads, intermediate size, vocabulary
    "llama-3.1-8b": (4096, 6144, 4096, 14336, 128256),
    "llama-3.1-70b": (8192, 10240, 8192, 28672, 128256),
    "llama-3.2-1b": (2048, 3072, 2048, 8192, 128256),
    "qwen2.5-7b": (3584, 4608, 3584, 18944, 152064),
}
LINEARS = ("qkv", "out", "up", "down", "head")
LAYERS = 32
EXPERTS = {  # experts, chosen, hidden, size of an expert
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-64": (64, 6, 2048, 1408),
    "deepseek-256": (256, 8, 7168, 2048),
}


@dataclass(frozen=True)
class Case:
    """A linear of a model, quantized."""

    form: str  # a key of CODES, or block
    linear: str  # one of LINEARS
    rows: int
    model: str = "llama-3.1-8b"  # a key of MODELS
    ranks: int = 1

    @property
    def shape(self) -> tuple[int, int, str]:
        """(outputs, input features, parts: n with a norm, r with a residual, g with a gate) of a rank's share of the weight."""
        hidden, qkv, heads, inner, vocab = MODELS[self.model]
        return {
            "qkv": (qkv // self.ranks, hidden, "n"),
            "out": (hidden, heads // self.ranks, "r"),
            "up": (inner // self.ranks, hidden, "ng"),
            "down": (hidden, inner // self.ranks, "r"),
            "head": (vocab // self.ranks, hidden, "n"),
        }[self.linear]

    @property
    def n(self) -> int:
        return self.shape[0]

    @property
    def k(self) -> int:
        return self.shape[1]

    @property
    def gated(self) -> bool:
        return "g" in self.shape[2]

    @property
    def group(self) -> int:
        return int(self.form.split("/")[1]) if "/" in self.form else 0

    @property
    def num_bytes(self) -> int:
        weights = self.n * self.k * (2 if self.gated else 1)
        return weights // 2 + weights // self.group * 2 if self.group else weights

    def fusion(self, device: str) -> Fusion:
        parts = self.shape[2]
        return Fusion(
            "rms" if "n" in parts else None,
            make(device, self.k) if "n" in parts else None,
            None,
            1e-5,
            "silu" if "g" in parts else None,
            make(device, self.rows, self.n) if "r" in parts else None,
        )

    def stored(self, device: str) -> tuple[PackedWeight, PackedWeight]:
        """(the weight for the kernel, the weight as it is stored)."""
        n, k = self.n * (2 if self.gated else 1), self.k
        if self.group:
            scale = make(device, n, k // self.group, dtype=torch.float16).abs() / (5 * k**0.5)
            weight = PackedWeight("int4", integers(device, torch.uint8, 256, n, k // 2), scale, None, self.group)
            return quant_int4.prepare_weight(weight), weight
        if self.form == "block":
            scale = (make(device, n // 128, k // 128, dtype=torch.float32).abs() + 0.5) / (60 * k**0.5)
            weight = PackedWeight("fp8", fp8_values(device, n, k), scale, group_size=128, block_rows=128, activations="group")
            return weight, weight
        scale = (make(device, n, dtype=torch.float32).abs() + 0.5) / (60 * k**0.5)
        if self.form == "fp8":
            weight = PackedWeight("fp8", fp8_values(device, n, k), scale, activations="token")
        else:
            weight = PackedWeight("int8", integers(device, INT8, 127, n, k), scale, activations="token" if self.form == "w8a8" else "none")
        return weight, weight

    def run(self, x: Tensor, stored: PackedWeight, fusion: Fusion, tile: QuantTile | None) -> Tensor:
        if self.form == "block":
            return quant_linear.block_fp8_activation_linear(x, stored, fusion, tile)
        if self.form.endswith(WIDENED):
            return quant_linear.plain_activation_linear(x, stored, fusion, tile)
        return quant_linear.quantized_activation_linear(x, stored, CODES[self.form], self.form, fusion, tile)


def make(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(shape, dtype=dtype, device=device)


def integers(device: str, dtype: torch.dtype, below: int, *shape: int) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randint(0 if dtype == torch.uint8 else -below, below, shape, dtype=dtype, device=device)


def fp8_values(device: str, *shape: int) -> Tensor:
    wide = make(device, *shape)
    return torch.empty(shape, dtype=FP8, device=device) if device == "meta" else (wide * 60).clamp_(-448, 448).to(FP8)


def candidates(case: Case) -> Iterator[QuantTile]:
    """The tiles to measure for a case of up to 64 rows."""
    if case.form == "block":
        for block_n, splits, stages in itertools.product((64, 128), (1, 2, 4), (4, 6)):
            if case.k // 128 % splits == 0 and 100 <= case.n // block_n * splits <= 1200:
                yield QuantTile(block_n, 128, splits, 4, stages, columns=16)
        return
    columns = case.rows * (1 if CODES[case.form] in ("fp8", "int8") else 2)  # bytes per feature: two digits, or one value of 16 bits
    one = case.rows == 1
    depths = (256,) if case.group else (128, 256) if one else (128, 256, 512)
    for block_n, block_k, splits in itertools.product((32, 64) if one else (64, 128), depths, (1, 2, 4)):
        stored = (block_n * (2 if case.gated else 1)) * (block_k // 2 if case.group else block_k) + block_k * max(columns, 8)
        ctas, max_ctas = -(-case.n // block_n) * splits, 4100 if case.n > 100000 else 1000
        fits = case.k % (block_k * splits) == 0 and case.k // (block_k * splits) >= 4 and 100 <= ctas <= max_ctas
        if not fits or stored * 4 > 200_000 or (block_n == 128 and case.gated and columns >= 64):
            continue
        warps = 8 if block_n == 128 or (case.gated and columns >= 64) else 2 if block_n == 32 else 4
        if case.form.endswith(WIDENED):
            yield from (QuantTile(block_n, block_k, splits, *shape) for shape in itertools.product((4, 8), (2, 3, 4)))
            continue
        widths = (8, 16) if one and case.form == "fp8" and block_n == 64 else (8,)
        for encode, wide in itertools.product((True, False) if one else (False,), widths):
            yield QuantTile(block_n, block_k, splits, warps, 4 if stored * 6 > 160_000 else 6, wide, encode)


def compile_one(job: tuple[Case, QuantTile | None]) -> str | None:
    case, tile = job
    try:
        with compiling(90):
            case.run(make("meta", case.rows, case.k), case.stored("meta")[0], case.fusion("meta"), tile)
    except Exception as problem:
        return f"{case} {tile}: {problem!r:.300}"
    return None


def signature(case: Case, tile: QuantTile | None) -> tuple[object, ...]:
    """The properties that select a compiled kernel."""
    return case.form, case.shape if tile is None else case.shape[2], tile, case.rows


def precompile(work: Sequence[tuple[Case, QuantTile | None]]) -> None:
    chosen = {signature(*job): job for job in work}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
        for problem in filter(None, pool.map(compile_one, chosen.values(), chunksize=2)):
            print("does not compile:", problem, flush=True)


def reference_linear(case: Case, x: Tensor, raw: PackedWeight, fusion: Fusion) -> Tensor:
    """float64 over the values that the codes stand for; activations rounded where the format rounds them."""
    wide = Fusion(
        fusion.norm_kind,
        None if fusion.norm_weight is None else fusion.norm_weight.double(),
        None,
        fusion.norm_eps,
        fusion.gate,
        None if fusion.residual is None else fusion.residual.double(),
    )

    def product(rows: Tensor) -> Tensor:
        if case.form == "block":
            return fp8_reference.round_groups(rows.float(), 128).double() @ fp8_reference.widen_blocks(raw).double().T
        if raw.format == "int4":
            return rows @ dequantize_int4(raw, torch.float64).T
        assert raw.scale is not None
        if case.form == "fp8":
            step = rows.abs().amax(-1, keepdim=True) / 448
            rows = (rows / step).float().to(FP8).double() * step
        if case.form == "w8a8":
            step = rows.abs().amax(-1, keepdim=True) / 127
            rows = (rows / step).round() * step
        return torch.cat([(rows @ part.double().T) for part in raw.values.split(16384)], -1) * raw.scale.double()

    return around(x.double(), wide, product)


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def report(line: dict[str, object]) -> dict[str, object]:
    speed = f"{line['us']:8.1f} us {line['tb_s']:5.2f} TB/s {line['share']:6.1%}"
    print(f"{line['form']:9} {line['what']:22} M={line['rows']:<5} {speed}  err {line['error']:.1e}  {line['note']}", flush=True)
    return line


def line(form: str, what: str, rows: int, us: float, num_bytes: float, error: float, note: str) -> dict[str, object]:
    rate = num_bytes / us / 1e6
    wrong = "" if error < 2e-2 else "  WRONG"
    share = rate / READ_TB_S
    return report({"form": form, "what": what, "rows": rows, "us": us, "tb_s": rate, "share": share, "error": error, "note": note + wrong})


def time_or_infinity(work: Callable[[], object]) -> float:
    try:
        return time_graph(work)
    except OutOfResources:  # of shared memory, which `candidates` does not compute exactly
        return math.inf


def measure(case: Case, fast: bool) -> dict[str, object]:
    """The best of all tiles and the launcher's tile of a case; with `fast`, that one only."""
    copies = max(2, ROTATED_BYTES // case.num_bytes + 1)
    x, fusion = make("cuda", case.rows, case.k), case.fusion("cuda")
    first, raw = case.stored("cuda")
    weights = [first, *(replace(first, values=first.values.clone(), scale=first.scale.clone()) for _ in range(copies - 1))]  # type: ignore[union-attr]

    def timed(tile: QuantTile | None) -> float:
        return time_or_infinity(lambda: [case.run(x, stored, fusion, tile) for stored in weights]) / copies

    times = {} if fast else {tile: timed(tile) for tile in candidates(case)}
    default = timed(None)
    best = min(times, key=lambda tile: times[tile]) if times else None
    us = times[best] if best else default
    error = error_of(case.run(x, first, fusion, best), reference_linear(case, x, raw, fusion))
    key = (1 if case.rows == 1 else padded_tokens(case.rows), case.n, case.k, case.gated)
    row = line(case.form, case.linear, case.rows, us, case.num_bytes, error, f"default {default:.1f}  {key}: {best}")
    return row | {"tiles": {str(tile): t for tile, t in sorted(times.items(), key=lambda item: item[1])[:5]}}


def compare_methods(form: str, linear: str) -> Iterator[dict[str, object]]:
    """Microseconds of each method for 64 to 2,048 rows of a linear, to find where the launcher should switch."""
    for rows in (64, 80, 96, 128, 160, 192, 256, 512, 2048):
        case = Case(form, linear, rows)
        x, fusion = make("cuda", rows, case.k), case.fusion("cuda")
        stored, raw = case.stored("cuda")
        want = reference_linear(case, x, raw, fusion) if rows <= 256 else None
        copies = [stored, *(replace(stored, values=stored.values.clone()) for _ in range(ROTATED_BYTES // case.num_bytes + 1))]
        for name, method in methods_of(form, x, stored, fusion).items():
            out = method(stored)
            error = error_of(out, want) if want is not None and out.shape == want.shape else 0.0
            us = time_graph(lambda method=method, copies=copies: [method(weight) for weight in copies]) / len(copies)  # type: ignore[misc]
            tops = 2 * rows * case.n * case.k * (2 if case.gated else 1) / us / 1e6
            yield line(form, f"{linear}, {name}", rows, us, case.num_bytes, error, f"{tops:.0f} TOP/s")


def methods_of(form: str, x: Tensor, stored: PackedWeight, fusion: Fusion) -> dict[str, Callable[[PackedWeight], Tensor]]:
    if form == "block":
        return {"tiles": lambda w: quant_linear.block_fp8_activation_linear(x, w, fusion)}
    methods: dict[str, Callable[[PackedWeight], Tensor]] = {}
    if form in ("fp8", "w8a8") or x.shape[0] <= 64:
        methods["quantized activations"] = lambda w: quant_linear.quantized_activation_linear(x, w, CODES[form], form, fusion)
    if form == "fp8":
        methods["library"] = lambda w: quant_fp8.large_fp8_linear(x, w, fusion)
    elif form == "w8a8":
        values = integers("cuda", INT8, 127, *x.shape)
        methods["library, product only"] = lambda w: torch._int_mm(values, w.values.t())
    else:
        methods["widened in tiles"] = lambda w: quant_linear.plain_activation_linear(x, w, fusion)
        methods["widened once"] = lambda w: quant_linear.dequantized_linear(x, w, dequantizer(stored, x), fusion)
    return methods


def dequantizer(stored: PackedWeight, x: Tensor) -> Callable[[int, int], Tensor]:
    if stored.format == "int8":
        return lambda a, b: quant_int8.dequantize_int8(stored, a, b, x.dtype)
    return lambda a, b: quant_int4.dequantize_int4(stored, a, b, x.shape[1], x.dtype)


def expert_cases() -> Iterator[tuple[str, str, int]]:
    for rows in (1, 8, 64, 512, 1024, 2048, 8192):
        yield "mixtral-8x7b", "dense", rows
        yield "mixtral-8x7b", "fp8", rows
    for rows in (1, 64):
        yield "mixtral-8x7b", "int8", rows
        yield "deepseek-64", "dense", rows
        yield "deepseek-64", "fp8", rows
        yield "deepseek-256", "fp8", rows
    for rows in (1024, 4096):
        yield "deepseek-64", "dense", rows
        yield "deepseek-64", "fp8", rows
    for rows in (1, 64, 2048):
        yield "mixtral-8x7b", "int4", rows
        yield "mixtral-8x7b", "int8/32", rows
        yield "deepseek-256", "block", rows


def expert_tiles(rows: int, tokens: int, down: bool, form: str) -> list[QuantTile | None]:
    if form == "int4":
        return [None, *(QuantTile(n, 256, s, w, st) for n, w in ((64, 4), (64, 8), (128, 8)) for s in (1, 2) for st in (2, 4))]
    if tokens > 64:
        return [None, *(QuantTile(n, k, 1, 8, st) for n, k, st in ((128, 64, 4), (128, 64, 3), (128, 128, 3), (128, 128, 4), (256, 64, 3)))]
    splits = (1, 2, 4) if rows <= 16 or down else (1, 2)
    return [None, *(QuantTile(n, k, s, 4, st) for n, k, st in ((64, 128, 4), (64, 256, 4), (32, 256, 4)) for s in splits)]


def expert_weights(form: str, experts: int, n: int, k: int, device: str) -> PackedWeight:
    """As stored: what the reference reads."""
    if form == "dense":
        return PackedWeight("dense", make(device, experts, n, k) if device == "meta" else make(device, experts, n, k) * k**-0.5)
    if form == "block":
        grid = torch.rand(experts, n // 128, k // 128, device=device) / (60 * k**0.5)
        values = fp8_values(device, experts, n, k)
        return PackedWeight("fp8", values, grid, group_size=128, block_rows=128, activations="group")
    if form in ("int4", "int8/32"):
        group = 128 if form == "int4" else 32
        grid = torch.rand(experts, n, k // group, device=device).half() / (8 if form == "int4" else 100) / k**0.5
        if form == "int8/32":
            return PackedWeight("int8", integers(device, INT8, 127, experts, n, k), grid, None, group)
        codes = integers(device, INT8, 127, experts, n, k // 2).view(torch.uint8)
        return PackedWeight("int4", codes, grid, torch.full(grid.shape, 8, dtype=torch.uint8, device=device), group)
    scale = torch.empty(experts, n, device=device) if device == "meta" else (torch.rand(experts, n, device=device) + 0.5) / (60 * k**0.5)
    if form == "int8":
        return PackedWeight("int8", integers(device, INT8, 127, experts, n, k), scale)
    weight = torch.stack([fp8_values(device, n, k) for _ in range(experts)]) if device != "meta" else fp8_values(device, experts, n, k)
    return PackedWeight("fp8", weight, scale, activations="token")


def pack_experts(weight: PackedWeight) -> PackedWeight:
    """What the kernel reads."""
    return quant_int4.prepare_weight(weight) if weight.format == "int4" else weight


def project(x: Tensor, weight: PackedWeight, routing: Routing, down: bool, tile: QuantTile | None) -> Tensor:
    return (moe.expert_down if down else moe.expert_up)(x, weight, routing, tile=tile)


def library_product(x: Tensor, weight: PackedWeight, routing: Routing, is_sorted: bool) -> Tensor:
    """PyTorch's grouped product, with the rows in the order of the choices, and in FP8 their quantization."""
    ends, transposed = routing.offsets[1:], weight.values.transpose(-2, -1)
    if weight.format == "dense":
        rows = x if is_sorted else x.index_select(0, routing.tokens)
        return torch._grouped_mm(rows, transposed, offs=ends)
    quantized = sorted_rows(x, weight, routing, None, is_sorted)
    return torch._scaled_grouped_mm(
        quantized.values, transposed, quantized.scale, weight.scale, offs=ends, out_dtype=x.dtype, use_fast_accum=True
    )


def library_note(x: Tensor, stored: PackedWeight, routing: Routing, down: bool, tile: QuantTile | None) -> str:
    """Its time, and how far it is from the kernel's sums before they are combined; where there is none, why."""
    if stored.format != "dense" and not (stored.format == "fp8" and stored.activations == "token"):
        return ""
    try:
        us = time_graph(lambda: library_product(x, stored, routing, down))
        if down:
            return f"  library {us:.1f}"
        error = error_of(library_product(x, stored, routing, down), project(x, stored, routing, down, tile).double())
        return f"  library {us:.1f} (differs by {error:.1e})"
    except (RuntimeError, AttributeError, TypeError) as problem:
        return f"  library: {str(problem).splitlines()[0]:.80}"


def compile_experts(job: tuple[str, str, int]) -> str | None:
    name, form, rows = job
    experts, top_k, hidden, size = EXPERTS[name]
    order, offsets = (make("meta", count, dtype=torch.int32) for count in (rows * top_k, experts + 1))
    routing = Routing(make("meta", rows, top_k, dtype=torch.float32), order, offsets)
    tokens = moe.tile_tokens(rows * top_k, experts)
    try:
        with compiling(90):
            router.route(make("meta", rows, experts, dtype=torch.float32), None, RoutingParams(top_k))
            for down, n, k in ((False, 2 * size, hidden), (True, hidden, size)):
                weight = pack_experts(expert_weights(form, experts, n, k, "meta"))
                for tile in expert_tiles(rows, tokens, down, form):
                    project(make("meta", rows * (top_k if down else 1), k), weight, routing, down, tile)
    except Exception as problem:
        return f"{job}: {problem!r:.300}"
    return None


def measure_experts(name: str, form: str, rows: int) -> Iterator[dict[str, object]]:
    experts, top_k, hidden, size = EXPERTS[name]
    logits = torch.randn(rows, experts, device="cuda")
    routing = router.route(logits, None, RoutingParams(top_k))
    expected = router_reference.route(logits.cpu(), None, RoutingParams(top_k))
    assert torch.equal(routing.order.cpu(), expected.order) and torch.equal(routing.offsets.cpu(), expected.offsets), "routing differs"
    used = int((routing.offsets.diff() > 0).sum())
    tokens = moe.tile_tokens(rows * top_k, experts)
    for down, n, k in ((False, 2 * size, hidden), (True, hidden, size)):
        stored = expert_weights(form, experts, n, k, "cuda")
        weight = pack_experts(stored)
        x = make("cuda", rows * (top_k if down else 1), k)
        tiles = expert_tiles(rows, tokens, down, form)
        times = {tile: time_or_infinity(partial(project, x, weight, routing, down, tile)) for tile in tiles}
        default = times.pop(None)
        best = min(times, key=lambda tile: times[tile])
        got = project(x, weight, routing, down, best)
        exact = moe_reference.expert_down if down else moe_reference.expert_up
        want = exact(x, stored, routing)
        bytes_read = int(used * n * k * {"dense": 2, "int4": 0.5}.get(form, 1))
        tflops = 2 * rows * top_k * n * k / times[best] / 1e6
        note = f"default {default:.1f}  {used} experts, {tflops:.0f} TFLOP/s  {(tokens, n, k)}: {best}"
        note += library_note(x, stored, routing, down, best) if tokens > 64 else ""
        yield line(form, f"{name} {'down' if down else 'up'}", rows, times[best], bytes_read, error_of(got, want.double()), note)
    us = time_graph(lambda: router.route(logits, None, RoutingParams(top_k)))
    print(f"          {name} routing of {rows}: {us:.1f} us", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--formats", default="fp8,int8,w8a8,int4/128,int4/32,block,moe")
    options.add_argument("--rows", default="1,16,32,64")
    options.add_argument("--linears", default=",".join(LINEARS))
    options.add_argument("--fast", action="store_true", help="the tiles that the launcher chooses only")
    options.add_argument("--compare", default="up", help="linears of which to compare methods by the number of rows")
    options.add_argument("--model", default="llama-3.1-8b", choices=list(MODELS))
    options.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, of which the shapes are one's")
    options.add_argument("--expert-rows", help="rows to measure with --formats moe")
    options.add_argument("--json", help="write the results to this file")
    chosen = options.parse_args()
    forms, counts = chosen.formats.split(","), [int(n) for n in chosen.rows.split(",")]
    expert_jobs = [job for job in expert_cases() if chosen.expert_rows is None or str(job[2]) in chosen.expert_rows.split(",")]
    torch.manual_seed(0)
    began = time.monotonic()
    cases = [
        Case(form, linear, rows, chosen.model, chosen.ranks)
        for form in forms
        if form != "moe"
        for linear in chosen.linears.split(",")
        for rows in counts
        if not (CODES.get(form) == "digits" and rows > 32) and not (form == "block" and rows not in (1, 64))
    ]
    precompile([(case, tile) for case in cases for tile in ([None] if chosen.fast else candidates(case))])
    if "moe" in forms:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
            for problem in filter(None, pool.map(compile_experts, expert_jobs)):
                print("does not compile:", problem, flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: compiled in {time.monotonic() - began:.0f} s", flush=True)
    results = [measure(case, chosen.fast) for case in cases]
    for form in forms:
        if form != "moe" and not form.endswith(WIDENED) and (chosen.model, chosen.ranks) == ("llama-3.1-8b", 1):
            for linear in filter(None, chosen.compare.split(",")):
                results += compare_methods(form, linear)
    if "moe" in forms:
        for job in expert_jobs:
            results += measure_experts(*job)
    for form, rows in itertools.product(forms, counts):
        step = {str(r["what"]): float(r["us"]) for r in results if r["form"] == form and r["rows"] == rows and r["what"] in LINEARS}  # type: ignore[arg-type]
        if len(step) == len(LINEARS) and chosen.model == "llama-3.1-8b":
            total = LAYERS * sum(us for what, us in step.items() if what != "head") + step["head"]
            weights = {what: Case(form, what, rows, chosen.model, chosen.ranks).num_bytes for what in LINEARS}
            floor = sum(count * (1 if what == "head" else LAYERS) for what, count in weights.items()) / READ_TB_S / 1e9
            print(f"{form:9} all linears of a step, M={rows}: {total / 1e3:.3f} ms, floor {floor / 1e3:.3f}", flush=True)
    print(f"total {time.monotonic() - began:.0f} s; the defaults are those of {quant_tile.__name__}")
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({**provenance(device="cuda"), "results": results}, file, indent=1, default=str)


if __name__ == "__main__":
    main()
