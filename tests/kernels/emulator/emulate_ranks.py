"""Run the fused layer kernel on several emulated ranks: `emulate_ranks.py FORM NUM_RANKS`. A process without TRITON_INTERPRET."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import torch
from emulated.launch import emulating
from fused_layer_cases import Results, check_rank, rank_problems
from oracle import TOLERANCE, relative_error
from torch import Tensor

from stoker.distributed.group import Group
from stoker.distributed.inbox import EMPTY, UNIT_BYTES, Inboxes, memory_bytes
from stoker.kernels.triton.all_reduce import sum_through_inbox
from stoker.kernels.triton.all_reduce_kernel import Choices
from stoker.kernels.triton.fused_layer.small_batch import launch as small_batch
from stoker.kernels.types import FusedLayer

# By form: features of each rank (heads, residual stream, MLP, and q, k and v), and CTAs. The last one of fp8 has no tile of any linear.
SIZES = {"fp8": ((128, 128, 128, 128), 5), "dense": ((64, 128, 64, 64), 2)}
MAX_BYTES = 8 * UNIT_BYTES  # of a message
MAX_POLLS = 1 << 20
DTYPE = torch.bfloat16


class Rank(Group):
    """A rank whose inbox its peers can access, in the same process."""

    def __init__(self, rank: int, memory: list[Tensor]) -> None:
        self.rank, self.size = rank, len(memory)
        self.inboxes: Inboxes = Inboxes([each.data_ptr() for each in memory], rank, torch.device("cpu"), MAX_BYTES)


class Ranks:
    """The ranks of an emulated machine, with inboxes that keep their content between launches."""

    def __init__(self, num_ranks: int, num_ctas: int) -> None:
        self.num_ctas = num_ctas
        size = memory_bytes(num_ranks, MAX_BYTES) // 4
        self.memory = [torch.full((size,), EMPTY, dtype=torch.int32) for _ in range(num_ranks)]
        self.groups = [Rank(rank, self.memory) for rank in range(num_ranks)]
        self.counters = [torch.zeros(1, dtype=torch.int32) for _ in range(num_ranks)]  # of the grid barriers

    def run_layers(self, x: list[Tensor], stream: Tensor, layers: list[FusedLayer], seed: int) -> list[Results]:
        """One launch of each rank, all of which run at the same time."""
        counters = mock.patch.object(small_batch, "barrier_counter", side_effect=self.counters)
        with emulating(seed, self.num_ctas, num_ranks=len(layers), shared_between_ranks=self.memory), counters:
            return [small_batch.run_small_batch(own, stream, layer) for own, layer in zip(x, layers, strict=True)]

    def all_reduce(self, x: list[Tensor], seed: int, weights: Tensor | None = None) -> list[Tensor]:
        """The all-reduce kernel, by each algorithm in turn. With `weights`, x are the results of experts for the choices of tokens."""
        choices = None if weights is None else Choices(weights, None)
        with emulating(seed, self.num_ctas, num_ranks=len(x), shared_between_ranks=self.memory):
            return [
                sum_through_inbox(own, None, group.inboxes.all_reduces[seed % len(group.inboxes.all_reduces)], choices=choices)
                for own, group in zip(x, self.groups, strict=True)
            ]


def main(form: str, num_ranks: int) -> None:
    """Repeated launches, with all-reduces of several sizes between them, take more turns than an inbox has buffers."""
    shape, num_ctas = SIZES[form]
    ranks = Ranks(num_ranks, num_ctas)
    layers, weights = rank_problems(form, shape, DTYPE, False, num_ranks, "cpu")
    layers = [replace(layer, group=group) for layer, group in zip(layers, ranks.groups, strict=True)]
    for launch in range(2):
        x, stream = [torch.randn(2, shape[0]).to(DTYPE) for _ in layers], torch.randn(2, shape[1]).to(DTYPE)
        x[0][0, 3] *= 20
        results = ranks.run_layers(x, stream, layers, launch)
        for rank, result in enumerate(results):
            assert torch.equal(result[0].view(torch.int16), results[0][0].view(torch.int16)), "the residual stream differs between ranks"
            check_rank(form, rank, result, x, stream, layers, weights)
        messages = [torch.randn(1500 * (launch + 1)).to(DTYPE) for _ in layers]
        for total in ranks.all_reduce(messages, launch):
            assert torch.equal(total, torch.stack(messages).double().sum(0).to(DTYPE))
        outputs, by_choice = [torch.randn(6, 1024).to(DTYPE) for _ in layers], torch.rand(3, 2)
        totals = ranks.all_reduce(outputs, launch, by_choice)
        summed = torch.stack([(each.double().unflatten(0, (3, 2)) * by_choice.double()[..., None]).sum(1) for each in outputs]).sum(0)
        for total in totals:
            assert relative_error(total, summed) < TOLERANCE[DTYPE]
            assert torch.equal(total.view(torch.int16), totals[0].view(torch.int16)), "the sums of experts differ between ranks"
    with emulating(0, num_ctas, shared_between_ranks=ranks.memory):  # a launch whose peers have ended ends, too
        small_batch.run_small_batch(x[0], stream, layers[0], max_polls=3)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], int(sys.argv[2]))
