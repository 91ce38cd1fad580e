"""Pipeline stages: each holds some of the layers, receives the hidden states from the previous stage and sends them to the next."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Stage:
    """Stage `index` of `num_stages`. The first has the embedding, the last the final norm and the head. This class is a single stage."""

    index = 0
    num_stages = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """The indices of the layers of this stage."""
        return stage_layers(num_layers, self.num_stages, self.index)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Wait for the hidden states of the previous stage, and return them. Raises TypeError for the first stage."""
        raise TypeError("the first stage has no previous stage")

    def send(self, x: Tensor) -> None:
        """Send the hidden states to the next stage. Raises TypeError for the last stage."""
        raise TypeError("the last stage has no next stage")


ALONE = Stage()


class LinkedStage(Stage):
    """A stage whose neighbours are ranks of `inner`. On a GPU, sends and receives are queued on the current stream."""

    def __init__(self, inner: dist.ProcessGroup, index: int, num_stages: int, ranks_per_stage: int) -> None:
        self.index, self.num_stages = index, num_stages
        self._inner = inner
        # Sends that the receiver may not have received yet. On a CPU, this stage continues with the next step meanwhile.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._previous, self._next = inner.rank() - ranks_per_stage, inner.rank() + ranks_per_stage

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive a tensor of this shape from the previous stage."""
        x = torch.empty(shape, dtype=dtype, device=device)
        self._inner.recv([x], self._previous, 0).wait()
        return x

    def send(self, x: Tensor) -> None:
        """Send a tensor to the next stage."""
        x = x.contiguous()
        work = self._inner.send([x], self._next, 0)
        if x.is_cuda:
            work.wait()
            return
        self._sent.append((work, x))
        if len(self._sent) > self.num_stages:
            self._sent.popleft()[0].wait()


class PlannedStage(Stage):
    """A stage of a model that does not run, for example to compute its layers or sizes."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index, self.num_stages = index, num_stages


def stage_layers(num_layers: int, num_stages: int, index: int) -> range:
    """The layers of a stage: a consecutive range, evenly divided. The first stages get the remainder, because the last one has the head."""
    size, remainder = divmod(num_layers, num_stages)
    start = index * size + min(index, remainder)
    return range(start, start + size + (index < remainder))
