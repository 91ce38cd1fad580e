"""The inputs of a step of several data-parallel ranks: a packed step for each, and the rows that the leader samples for all of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.core.forward_batch import RankCounts
from stoker.runtime.schedule.plan import StepPlan
from stoker.runtime.staging import StagingBuffers
from stoker.runtime.worker.dummy_step import pack_dummy_step
from stoker.runtime.worker.inputs import InputBuilder, PackedStep, Shape, split_buffer

_IDLE = Shape(1, 1, is_decode=False)  # the step of a rank without work, unless a captured graph runs it
_ALIGN = 4  # int32: 16 bytes


def pack_parts(inputs: InputBuilder, plan: StepPlan, shape: Shape | None) -> list[PackedStep]:
    """The inputs of each rank, all padded to `shape` if a captured graph runs them. A rank without rows runs a dummy step."""
    packed = [inputs.pack(part, shape) if part.sequences else _pack_idle(inputs, shape) for part in plan.parts]
    return with_counts(packed)


def with_counts(packed: list[PackedStep]) -> list[PackedStep]:
    """The steps of all ranks, in each of which the sizes of all are set."""
    ranks = RankCounts(
        tuple(step.shape.tokens for step in packed), tuple(step.num_logits for step in packed), tuple(step.num_sampled for step in packed)
    )
    for step in packed:
        step.ranks = ranks
    return packed


def _pack_idle(inputs: InputBuilder, shape: Shape | None) -> PackedStep:
    """The dummy step of a rank without rows."""
    return pack_dummy_step(inputs, _IDLE, num_logits=0) if shape is None else pack_dummy_step(inputs, shape, is_padded=True)


def uniform_counts(num_ranks: int, tokens: int, logits: int) -> RankCounts:
    """The sizes of a step in which all ranks have the same shape."""
    return RankCounts((tokens,) * num_ranks, (logits,) * num_ranks, (logits,) * num_ranks)


class AllRows:
    """The rows and counters of the tokens that a step samples on all ranks, on the device of the leader. Captured graphs read them."""

    def __init__(self, max_sampled: int, device: torch.device, num_in_flight: int = 2) -> None:
        """`max_sampled`: the largest number of sampled tokens of all ranks together, including padding."""
        self._size = -(-max_sampled // _ALIGN) * _ALIGN
        self._device = torch.zeros(2 * self._size, dtype=torch.int32, device=device)
        self._buffers = StagingBuffers(device, num_in_flight)

    def update(self, packed: list[PackedStep]) -> None:
        """Start to copy the rows and counters of a step to the device."""
        parts = [split_buffer(step.host.numpy(), step.sizes)[6:8] for step in packed]
        host = self._buffers.next_buffer(self._device.numel() * self._device.itemsize).view(torch.int32)
        for half, arrays in zip(host.split(self._size), zip(*parts, strict=True), strict=True):
            joined = np.concatenate(arrays)
            half.numpy()[: len(joined)] = joined
            half.numpy()[len(joined) :] = 0  # valid rows, which the next capture reads
        self._device.copy_(host, non_blocking=True)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """(rows, counters) of the first `count` sampled tokens, int32 [count] each."""
        rows, counters = self._device.split(self._size)
        return rows[:count], counters[:count]


def sampled_first(logits: Tensor, ranks: RankCounts) -> Tensor:
    """The logits [L, V] of all ranks, with those of sampled tokens before those of prompt tokens."""
    if ranks.logits == ranks.sampled:
        return logits
    parts = logits.split(ranks.logits)
    pairs = [part.tensor_split([count]) for part, count in zip(parts, ranks.sampled, strict=True)]
    return torch.cat([pair[which] for which in (0, 1) for pair in pairs])
