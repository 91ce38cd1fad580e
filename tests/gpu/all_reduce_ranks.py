"""All-reduces, and sampling from shards, of tensor-parallel ranks with a GPU each: `all_reduce_ranks.py NUM_RANKS`."""

from __future__ import annotations

import random
import sys
import time

import torch
from tensor_parallel_ranks import run_ranks
from torch import Tensor

from stoker.distributed.symmetric import SymmetricGroup
from stoker.kernels import ops
from stoker.kernels.triton.all_reduce import all_reduce_choices
from stoker.kernels.triton.all_reduce_kernel import Choices

DTYPE = torch.bfloat16
HIDDEN, TOP_K = 4096, 2
# Tokens: a unit, less than a wave of CTAs, messages of several waves, the largest one of two ranks, and one that is not a whole unit.
SUMMED = (1, 3, 64, 384, 512, 768, 1024, 2048)
REPLAYS = 100
SAMPLED, VOCABULARY = 200, 128_251  # rows, and logits, of which the last rank has fewer


def message(seed: int, tokens: int, size: int = HIDDEN) -> Tensor:
    values = torch.randn(tokens, size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(DTYPE)
    values[0, :2] = torch.tensor([-0.0, 0.0])  # -0.0 has the bits of an empty inbox
    return values


def rounded(summands: list[Tensor], residual: Tensor) -> Tensor:
    """Their sum in float64, rounded once."""
    total = residual.double()
    for summand in summands:
        total += summand.double()
    return total.to(DTYPE)


def check_sums(group: SymmetricGroup) -> None:
    """Sums of all sizes, and of the results of experts, mixed in a graph: float64, the same bits on all ranks and in every replay."""
    residuals = [message(99, tokens) for tokens in SUMMED]
    messages = [[message(rank, tokens) for rank in range(group.size)] for tokens in SUMMED]
    results = [[message(10 + rank, tokens * TOP_K) for rank in range(group.size)] for tokens in SUMMED]
    choices = [
        Choices(torch.rand(tokens, TOP_K, generator=torch.Generator("cuda").manual_seed(tokens), device="cuda"), None) for tokens in SUMMED
    ]

    def run() -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for i, residual in enumerate(residuals):
            found.append(ops.all_reduce(messages[i][group.rank].clone(), group, residual))
            found.append(all_reduce_choices(results[i][group.rank], choices[i], group, residual))
        return found

    first = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated = run()
    draw = random.Random(group.rank)
    for _ in range(REPLAYS):
        graph.replay()
        if draw.random() < 0.2:
            torch.cuda.synchronize()
            time.sleep(draw.choice((0.0, 0.002)))  # ranks arrive early and late
    torch.cuda.synchronize()
    for i, residual in enumerate(residuals):
        weights = choices[i].weights_ptr.double()[..., None]
        summed = [(each.double().unflatten(0, (-1, TOP_K)) * weights).sum(1).to(DTYPE) for each in results[i]]
        for j, summands in ((2 * i, messages[i]), (2 * i + 1, summed)):
            once, again = first[j], repeated[j]
            if once is None or again is None:
                assert group.inbox(residual.nbytes) is None
                continue
            assert torch.equal(once, again), (SUMMED[i], "replays differ")
            everywhere = group.all_gather(once).unflatten(-1, (group.size, -1))
            assert torch.equal(everywhere, once.unsqueeze(-2).expand_as(everywhere)), (SUMMED[i], "ranks differ")
            # Sums in float32 that are rounded once or twice may round to the neighbour of the nearest value.
            error = (once.double() - rounded(summands, residual).double()).norm() / once.double().norm()
            assert error < 3e-3, (SUMMED[i], float(error))


def check_shards(group: SymmetricGroup) -> None:
    """Greedy tokens from shards of the logits, in a graph: those of all logits, on every rank. There are ties between shards."""
    logits = torch.randint(-9, 9, (SAMPLED, VOCABULARY), generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(DTYPE)
    logits[SAMPLED // 2 :] = torch.randn(logits[SAMPLED // 2 :].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(
        DTYPE
    )
    size = -(-VOCABULARY // group.size)
    shard = torch.nn.functional.pad(logits, (0, group.size * size - VOCABULARY), value=99.0).split(size, 1)[group.rank].contiguous()
    ops.sample_shards(shard, VOCABULARY, group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.sample_shards(shard, VOCABULARY, group)
    for _ in range(REPLAYS):
        found.zero_()
        graph.replay()
        largest = logits == logits.amax(1, keepdim=True)
        assert torch.equal(found, largest.int().argmax(1).int()), "the first of the largest logits"


def check(group: SymmetricGroup) -> None:
    check_sums(group)
    check_shards(group)


if __name__ == "__main__":
    run_ranks(check, int(sys.argv[1]))
