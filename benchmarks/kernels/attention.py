"""Measures paged attention on one CUDA device: compares it with float64, then times tiles and splits against the theoretical limits.

    PYTHONPATH=src python benchmarks/kernels/attention.py [--only "decode 64"] [--json FILE]

Shapes are those of Llama-3.1-8B: 32 query heads, 8 key heads of 128, blocks of 64 tokens; with 4 key heads, of one of two ranks of
Llama-3.1-70B. Times are medians of CUDA graph replays over
rotating caches, which together are several times the size of the L2 cache. Kernels are compiled before, in several processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.cli.benchmark.results import provenance
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.kernels.reference import attention as reference
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.attention import launch as kernels
from stoker.kernels.triton.attention.tiles import AttentionTile, Splits
from stoker.kernels.types import LONG_SPLIT, MEAN_TOKENS, AttentionParams
from stoker.runtime.worker.split_length import split_length

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 64
SPLIT_ROWS = (33, 48, 64, 128, 256)
RESIDENT_CTAS = 4 * 132  # of an H200, as `num_resident_rows` counts them
READ_CEILING = 4.42e12  # bytes/s, measured read-only stream of an H200
MATRIX_CEILING = 790e12  # bf16 FLOP/s
PARAMS = AttentionParams(SIZE**-0.5)
ROTATED_BYTES = 512 << 20
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """`rows` of `queries` tokens each over `context` keys; `bound` is the max_seq_len of a captured graph.

    With `longest`, the first row has as many keys. Decodes have the length of splits that a step of these rows has.
    """

    rows: int
    queries: int
    context: int
    cache_dtype: torch.dtype = BF16
    bound: int = 0
    kv_heads: int = KV_HEADS
    has_mean: bool = False
    longest: int = 0

    @property
    def lens(self) -> list[int]:
        return [self.longest or self.context, *[self.context] * (self.rows - 1)]

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lens) * self.kv_heads * SIZE * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        """Two operations per multiply-add of the causal part of q·k and p·v."""
        seen = sum(range(self.context - self.queries + 1, self.context + 1))
        return 4 * SIZE * HEADS * seen * self.rows

    def __str__(self) -> str:
        kind = "decode" if self.queries == 1 else "prefill"
        cache = str(self.cache_dtype).removeprefix("torch.") + (" less means" if self.has_mean else "")
        context = f"{self.context} and {self.longest}" if self.longest else str(self.context)
        limit = f", limit {self.bound}" if self.bound > 8192 else ""
        return f"{kind} {self.rows} x {self.queries} over {context}{limit}, {self.kv_heads} heads, {cache}"


@dataclass(frozen=True)
class Variant:
    """A tile and a number of splits. None: the choice of the launcher, with `tokens` per split, or 0: those that a step has."""

    tile: AttentionTile | None = None
    splits: Splits | None = None
    tokens: int = 0

    def __str__(self) -> str:
        if self.tokens:
            return "not cut" if self.tokens == LONG_SPLIT else f"splits of {self.tokens}"
        tile = "tuned" if self.tile is None else f"{self.tile.block_m}x{self.tile.block_n} w{self.tile.num_warps} s{self.tile.num_stages}"
        return f"{tile}, " + ("tuned splits" if self.splits is None else f"{self.splits.count} splits")


@dataclass
class Problem:
    q: Tensor
    cache: KVCache
    batch: ForwardBatch
    out: Tensor
    split_tokens: int  # of a step of these rows

    def set_split_tokens(self, variant: Variant) -> None:
        """Write the length of splits before a launch, as the host does before a step."""
        assert self.batch.split_tokens is not None
        self.batch.split_tokens.fill_(variant.tokens or self.split_tokens)

    def run(self, variant: Variant) -> None:
        launch = kernels.decode if self.batch.num_decodes else kernels.prefill
        launch(self.q, self.cache, self.batch, PARAMS, self.out, variant.tile, variant.splits)


def problem(
    lens: list[int],
    queries: list[int],
    cache_dtype: torch.dtype,
    bound: int,
    device: str,
    dtype: torch.dtype = BF16,
    kv_heads: int = KV_HEADS,
    has_mean: bool = False,
) -> Problem:
    """Random values and block tables in random order. Entries after the end of a row are invalid. has_mean: keys are stored less a mean."""
    blocks_each = [-(-n // BLOCK) for n in lens]
    pages = (sum(blocks_each) + 1, kv_heads, BLOCK, SIZE)
    scale = torch.rand(kv_heads, device=device) + 0.5 if cache_dtype == FP8 else None
    cache = KVCache(*(torch.randn(pages, dtype=BF16, device=device).to(cache_dtype) for _ in range(2)), scale, scale)
    if has_mean:
        cache.key_mean = torch.randn(kv_heads, -(-bound // MEAN_TOKENS), SIZE, device=device) * 3
    table = torch.full((len(lens), -(-bound // BLOCK)), 1 << 30, dtype=torch.int32)
    order = torch.randperm(sum(blocks_each), dtype=torch.int32).split(blocks_each)
    for row, blocks in enumerate(order):
        table[row, : len(blocks)] = blocks
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tokens = int(starts[-1])
    fused = torch.randn(tokens, (HEADS + 2 * kv_heads) * SIZE, dtype=dtype, device=device)
    q = fused[:, : HEADS * SIZE].view(tokens, HEADS, SIZE)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        zeros,
        zeros,
        zeros,
        starts.to(device),
        torch.tensor(lens, dtype=torch.int32).to(device),
        table.to(device),
        sum(n == 1 for n in queries),
        max(queries),
        bound,
        split_tokens=torch.zeros(1, dtype=torch.int32, device=device),
    )
    split_tokens = split_length(np.array(lens[: batch.num_decodes]), RESIDENT_CTAS / kv_heads)
    out = torch.full((tokens, HEADS, SIZE), float("nan"), dtype=dtype, device=device)
    return Problem(q, cache, batch, out, split_tokens)


def of_shape(shape: Shape, device: str) -> Problem:
    bound = shape.bound or shape.context
    return problem(
        shape.lens, [shape.queries] * shape.rows, shape.cache_dtype, bound, device, kv_heads=shape.kv_heads, has_mean=shape.has_mean
    )


def compile_variant(work: tuple[Shape, Variant]) -> None:
    shape, variant = work
    with compiling(90):
        of_shape(shape, "meta").run(variant)


def ragged_error(shape: Shape, variant: Variant, dtype: torch.dtype = BF16) -> float:
    """‖out − float64‖ / ‖float64‖ for new rows of different lengths, launched with the settings of `shape`."""
    is_decode = shape.queries == 1
    longest = min(shape.context, 1000 if is_decode else 600)  # limited, because float64 on the CPU is slow
    lens = [longest, *torch.randint(1 if is_decode else 2, longest + 1, (8 if is_decode else 3,)).tolist()]
    queries = [1 if is_decode else int(torch.randint(2, n + 1, ())) for n in lens]
    ragged = problem(lens, queries, shape.cache_dtype, shape.bound or shape.context, "cuda", dtype, shape.kv_heads, shape.has_mean)
    ragged.set_split_tokens(variant)
    ragged.run(variant)
    torch.cuda.synchronize()
    return relative_error(ragged)


def relative_error(result: Problem) -> float:
    cache, batch = result.cache, result.batch
    real = [pages.cpu().double() for pages in (cache.keys, cache.values)]
    scale, mean = (None if part is None else part.cpu() for part in (cache.key_scale, cache.key_mean))
    on_cpu = ForwardBatch(
        *(t.cpu() for t in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens, batch.block_tables)),
        batch.num_decodes,
        batch.max_query_len,
        batch.max_seq_len,
    )
    expected = reference.attention(result.q.cpu().double(), KVCache(*real, scale, scale, key_mean=mean), on_cpu, PARAMS)
    return float((result.out.cpu().double().flatten(1) - expected).norm() / expected.norm())


def graph_time(launches: list[Callable[[], None]], replays: int = 30) -> float:
    """Median seconds of one launch, among back-to-back launches of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 16 // len(launches))
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches * repeats:
            launch()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (len(launches) * repeats))
    return statistics.median(times[3:])


def measure(shape: Shape, variants: list[Variant]) -> list[dict[str, object]]:
    copies = 4 if shape.queries > 1 else min(64, max(1, -(-ROTATED_BYTES // shape.kv_bytes)))
    problems = [of_shape(shape, "cuda") for _ in range(copies)]
    rows = []
    for variant in variants:
        error = ragged_error(shape, variant)
        for made in problems:
            made.set_split_tokens(variant)
        seconds = graph_time([lambda p=made, v=variant: p.run(v) for made in problems])
        rate = (
            (shape.kv_bytes / seconds, "TB/s", READ_CEILING) if shape.queries == 1 else (shape.flops / seconds, "TFLOP/s", MATRIX_CEILING)
        )
        speed = f"{seconds * 1e6:9.2f} us {rate[0] / 1e12:8.2f} {rate[1]:7} {rate[0] / rate[2]:6.1%}"
        print(f"{shape!s:56} {variant!s:34} {speed}  error {error:.1e}{'' if error < 1e-2 else '  WRONG'}", flush=True)
        rows.append({"shape": str(shape), "variant": str(variant), "us": seconds * 1e6, "fraction": rate[0] / rate[2], "error": error})
    return rows


def plan() -> dict[Shape, list[Variant]]:
    tuned = Variant()
    shapes = ((16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 8, 3), (16, 32, 2, 4))
    tiles = [AttentionTile(*shape) for shape in shapes]
    whole = AttentionTile(16, 64, 4, 3)
    half_of_70b = [
        Variant(tile, Splits(n)) for tile in (whole, AttentionTile(16, 64, 4, 4), AttentionTile(16, 32, 1, 3)) for n in (1, 2, 4)
    ]
    variants = [Variant(tile) for tile in tiles]
    lengths = [tuned, Variant(splits=Splits(1)), *(Variant(tokens=keys) for keys in (LONG_SPLIT, 2048, 1024, 512))]
    return {
        Shape(1, 1, 1000, bound=1024): [tuned, *variants, *(Variant(whole, Splits(n)) for n in (8,))],
        Shape(1, 1, 1000, bound=8192): [tuned],
        Shape(8, 1, 1000, bound=1024): [tuned, *(Variant(whole, Splits(n)) for n in (2, 4, 8))],
        Shape(64, 1, 1000, bound=1024): [tuned, *variants, *(Variant(whole, Splits(n)) for n in (2, 4))],
        Shape(256, 1, 1000, bound=1024): [tuned, *variants],
        Shape(1, 1, 1000, FP8, 1024): [tuned],
        Shape(64, 1, 1000, FP8, 1024): [tuned, Variant(whole), Variant(AttentionTile(16, 64, 4, 4)), Variant(AttentionTile(16, 128, 4, 3))],
        **{Shape(64, 1, keys, FP8, 4096, 4, True): [tuned, *half_of_70b] for keys in (250, 1000, 2000)},
        **{Shape(rows, 1, 1000, FP8, 4096, 4, True): [tuned, *half_of_70b] for rows in (16, 32, 128)},
        Shape(256, 1, 1000, FP8, 1024): [tuned, Variant(AttentionTile(16, 64, 4, 4))],
        **{Shape(rows, 1, keys, cache, 6144): lengths for rows in SPLIT_ROWS for keys in (1100, 2100) for cache in (FP8, BF16)},
        **{Shape(rows + 1, 1, keys, FP8, 6144, longest=4000): lengths for rows in (32, 64, 128, 256) for keys in (300, 1000, 2000)},
        **{Shape(33, 1, keys, BF16, 6144, longest=4000): lengths for keys in (300, 2000)},
        Shape(33, 1, 300, FP8, 131_072, longest=4000): lengths,
        Shape(4, 2048, 2048): [
            tuned,
            *(Variant(AttentionTile(*t)) for t in ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2))),
            *(Variant(AttentionTile(*t)) for t in ((128, 128, 8, 2), (128, 32, 8, 4), (128, 64, 4, 3))),
        ],
        Shape(1, 8192, 8192): [tuned, Variant(AttentionTile(128, 64, 8, 3))],
        Shape(1, 128, 128): [tuned, Variant(AttentionTile(128, 64, 8, 2)), Variant(AttentionTile(16, 64, 4, 3))],
        Shape(1, 512, 8192): [tuned, Variant(AttentionTile(128, 64, 8, 3))],
        Shape(4, 2048, 2048, FP8): [tuned, Variant(AttentionTile(128, 128, 8, 2))],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="the beginning of the names of shapes to measure")
    options.add_argument("--json", help="write the results to this file")
    chosen = options.parse_args()
    torch.manual_seed(0)
    began = time.monotonic()
    planned = {shape: variants for shape, variants in plan().items() if str(shape).startswith(chosen.only)}
    work = [(shape, variant) for shape, variants in planned.items() for variant in variants]
    with ProcessPoolExecutor(max(1, min(12, multiprocessing.cpu_count() - 1)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_variant, work, chunksize=2))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(work)} variants compiled in {time.monotonic() - began:.1f} s",
        flush=True,
    )
    fp32 = [ragged_error(Shape(*s, cache_dtype=torch.float32), Variant(), torch.float32) for s in ((1, 1, 1000), (1, 300, 500))]
    print(f"float32 error: decode {fp32[0]:.1e}, prefill {fp32[1]:.1e}" + ("" if max(fp32) < 1e-5 else "  WRONG"), flush=True)
    results = [row for shape, variants in planned.items() for row in measure(shape, variants)]
    print(f"total {time.monotonic() - began:.1f} s")
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({**provenance(device="cuda"), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
