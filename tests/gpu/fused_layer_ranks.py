"""The fused layer kernel on tensor-parallel ranks, a process and a GPU for each: `fused_layer_ranks.py NUM_RANKS`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

import torch
from fused_layer_cases import Results, check_rank, rank_problems
from tensor_parallel_ranks import run_ranks

from stoker.distributed.symmetric import SymmetricGroup
from stoker.kernels import ops
from stoker.kernels.triton.fused_layer.launch import fused_layer, supports_fused_layer
from stoker.kernels.types import FusedLayer

SMALL, MEDIUM = (256, 512, 768, 320), (1280, 1024, 2816, 1536)
LLAMA_70B = (4096, 8192, 14336, 5120)  # on two ranks
# Form, features of each rank (heads, residual stream, MLP, and q, k and v), and numbers of rows, of which the last one is the largest.
CASES = [
    ("fp8", SMALL, (1, 4)),
    ("fp8", MEDIUM, (3, 4)),
    ("fp8", LLAMA_70B, (1, 4)),
    ("dense", SMALL, (2, 6)),
    ("int4 int", MEDIUM, (1, 3)),
    ("bytes", SMALL, (2,)),
]
DTYPE = torch.bfloat16
REPLAYS = 200


def check(form: str, shape: tuple[int, ...], rows_of_cases: tuple[int, ...], group: SymmetricGroup) -> None:
    """Results equal float64, have the same bits on all ranks, and are the same in every replay of a graph."""
    layers, weights = rank_problems(form, shape, DTYPE, False, group.size, "cuda")
    layer = replace(layers[group.rank], group=group)
    assert not supports_fused_layer(layer, rows_of_cases[-1] + 1)
    for rows in rows_of_cases:
        assert supports_fused_layer(layer, rows)
        x = [torch.randn(rows, shape[0], device="cuda").to(DTYPE) for _ in layers]
        stream = torch.randn(rows, shape[1], device="cuda").to(DTYPE)
        x[0][0, 3] *= 20
        torch.full((1 << 22,), float("nan"), device="cuda")  # the next allocations hold these values
        first = fused_layer(x[group.rank], stream, layer)
        check_rank(form, group.rank, first, x, stream, layers, weights)
        everywhere = group.all_gather(first[0]).unflatten(-1, (group.size, -1))
        assert torch.equal(everywhere, first[0].unsqueeze(-2).expand_as(everywhere)), "the residual stream differs between ranks"
        check_replays(x[group.rank], stream, layer, group, first)


def check_replays(x: torch.Tensor, stream: torch.Tensor, layer: FusedLayer, group: SymmetricGroup, first: Results) -> None:
    """A graph of fused layers and all-reduces of another size, which use the same inboxes."""
    message = torch.full((3000,), group.rank + 1.0, dtype=DTYPE, device="cuda")
    ops.all_reduce(message, group)  # compiles its kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated = []
        for _ in range(5):
            repeated.append(fused_layer(x, stream, layer))
            total = ops.all_reduce(message, group)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    assert (total == group.size * (group.size + 1) / 2).all()
    assert all(one is other or torch.equal(one, other) for results in repeated for one, other in zip(results, first, strict=True))  # type: ignore[arg-type]


def check_cases(group: SymmetricGroup) -> None:
    torch.manual_seed(0)
    for case in CASES:
        check(*case, group)


if __name__ == "__main__":
    run_ranks(check_cases, int(sys.argv[1]))
