"""Measures tiles of dense linears: candidates are compiled in parallel and timed in CUDA graphs, with weights larger than the L2 cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from stoker.kernels.triton.aot.offline_target import compiling
from stoker.kernels.triton.gemm.dense import launch as kernels
from stoker.kernels.tuning.tiles import LinearTile
from stoker.kernels.types import Fusion

_CACHE_BYTES = 256 << 20  # several times the L2 cache of an H200 (60 MB)


@dataclass(frozen=True, slots=True)
class LinearCase:
    """A linear of a decode step."""

    rows: int  # 1, 16, 32 or 64
    n: int  # output features; of the gate and of the up projection each, if gated
    k: int
    gated: bool = False
    norm: bool = False
    add: bool = False

    def tensors(self, device: str, dtype: torch.dtype, copies: int = 1) -> tuple[Tensor, list[Tensor], Fusion]:
        """(random x, `copies` random weights, fusion) of the case. On the meta device they have no content."""

        def random(*shape: int) -> Tensor:
            """A tensor of this shape with normally distributed values."""
            return torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(shape, dtype=dtype, device=device)

        weights = [random(self.n * (2 if self.gated else 1), self.k) for _ in range(copies)]
        fusion = Fusion(
            norm_kind="rms" if self.norm else None,
            norm_weight=random(self.k) if self.norm else None,
            norm_eps=1e-5,
            gate="silu" if self.gated else None,
            residual=random(self.rows, self.n) if self.add else None,
        )
        return random(self.rows, self.k), weights, fusion


def candidates(case: LinearCase) -> Iterator[LinearTile]:
    """The tiles that are timed for a case."""
    if case.rows == 1:
        for block_n, block_k, warps, stages in itertools.product((1, 2, 4, 8), (512, 1024), (2, 4), (1, 3)):
            accumulators = block_n * block_k * (2 if case.gated else 1) // (32 * warps)  # per thread
            if 8 <= accumulators <= 64 and case.k % block_k == 0:
                yield LinearTile(block_n, block_k, 1, warps, stages)
        return
    for block_n, block_k, splits, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 4), (4, 6)):
        shared = stages * block_k * (block_n * (2 if case.gated else 1) + case.rows) * 2
        ctas = -(-case.n // block_n) * splits
        fits = shared <= 200_000 and case.k % (block_k * splits) == 0 and case.k // (block_k * splits) >= 2
        if fits and 100 <= ctas <= 1200:
            for fused in (True, False) if case.norm else (True,):
                yield LinearTile(block_n, block_k, splits, 4 if block_n <= 64 else 8, stages, fused)


def precompile(cases: Iterable[LinearCase], processes: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile all candidates of `cases` into Triton's cache, in parallel processes."""
    jobs = [(case, tile, dtype) for case in cases for tile in candidates(case)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, jobs, chunksize=4))


def _compile(job: tuple[LinearCase, LinearTile, torch.dtype]) -> None:
    """Compile one kernel into Triton's cache, in a process of the pool."""
    case, tile, dtype = job
    x, weights, fusion = case.tensors("meta", dtype)
    with compiling():
        kernels.small_linear(x, weights[0], None, fusion, tile)


def time_linear(
    case: LinearCase, tiles: Iterable[LinearTile | None], dtype: torch.dtype = torch.bfloat16
) -> dict[LinearTile | None, float]:
    """The time in µs of one launch with each tile. None in `tiles` stands for the library's GEMM with separate kernels for the fusion."""
    copies = max(2, _CACHE_BYTES // (case.n * case.k * dtype.itemsize * (2 if case.gated else 1)) + 1)
    x, weights, fusion = case.tensors("cuda", dtype, copies)

    def run(tile: LinearTile | None) -> None:
        """Launch the linear once for each weight."""
        for weight in weights:
            if tile is None:
                kernels.library_linear(x, weight, None, fusion)
            else:
                kernels.small_linear(x, weight, None, fusion, tile)

    return {tile: time_graph(lambda tile=tile: run(tile)) / copies for tile in tiles}  # type: ignore[misc]


def time_graph(work: Callable[[], object], repeats: int = 7) -> float:
    """The median time in µs of one replay of `work`, captured in a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]
