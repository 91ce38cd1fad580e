"""Dispatch of tokens among data-parallel ranks, each of which has its own sequences and some of the experts of each layer.

Every rank gathers the tokens of all ranks, computes its own experts for them, and receives the sums over all ranks for its own tokens: an
all-gather and a reduce-scatter. In each layer a rank receives (N - 1) / N of the T tokens of a step and sends as many sums, each of
hidden_size values. docs/parallel.md compares these bytes with those of an all-to-all.

Collectives have the same shape on all ranks, so the tokens of each rank are padded to the largest count. The leader plans the steps of
all ranks, so that each rank knows all counts without another collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.distributed.group import Group


class TokenDispatch:
    """The collectives of one rank. `counts` are the numbers of tokens of each rank in the current step, at least one each."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.counts: tuple[int, ...] = (1,) * group.size

    def gather_tokens(self, x: Tensor) -> Tensor:
        """The tokens of all ranks [sum of counts, ...], those of rank 0 first, from those of this rank [T, ...]."""
        return gather_ragged(self.group, x, self.counts)

    def sum_tokens(self, x: Tensor) -> Tensor:
        """The sums over all ranks for the tokens of this rank [T, ...], from this rank's summands for all tokens [sum of counts, ...]."""
        size, longest = self.group.size, max(self.counts)
        if x.shape[0] != size * longest:
            padded = x.new_zeros(size, longest, *x.shape[1:])
            for target, part in zip(padded, x.split(self.counts), strict=True):
                target[: len(part)] = part
            x = padded.flatten(0, 1)
        return self.group.reduce_scatter_rows(x)[: self.counts[self.group.rank]]


def gather_ragged(group: Group, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The rows of all ranks [sum of counts, ...], those of rank 0 first. `x` [counts[rank], ...] are those of this rank."""
    longest = max(counts)
    if len(x) < longest:
        x = torch.cat((x, x.new_zeros(longest - len(x), *x.shape[1:])))
    gathered = group.gather_rows(x)
    if all(count == longest for count in counts):
        return gathered
    return torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])
