"""The line of stages that a model's layers are split over: the stream comes in from the stage before and goes out to the next."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Stage:
    """One of `num_stages`: `index` 0 has the embedding, the last one the final norm and the head. This one is alone."""

    index = 0
    num_stages = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. Later stages have the odd ones, but the last, which has the head, gets its own last."""
        return stage_layers(num_layers, self.num_stages, self.index)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The stream that the stage before sent."""
        raise TypeError("the first stage has none before it")

    def send(self, x: Tensor) -> None:
        """Hand the stream on."""
        raise TypeError("the last stage has none after it")


ALONE = Stage()


class LinkedStage(Stage):
    """A stage whose neighbours are ranks of `inner`. On a GPU both directions are queued on the current stream."""

    def __init__(self, inner: dist.ProcessGroup, index: int, num_stages: int, ranks_per_stage: int) -> None:
        self.index, self.num_stages = index, num_stages
        self._inner = inner
        # Sends that the receiver may not have taken: on a CPU, this stage goes on with the next step meanwhile.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._before, self._after = inner.rank() - ranks_per_stage, inner.rank() + ranks_per_stage

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=device)
        self._inner.recv([x], self._before, 0).wait()
        return x

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        work = self._inner.send([x], self._after, 0)
        if x.is_cuda:
            work.wait()
            return
        self._sent.append((work, x))
        if len(self._sent) > self.num_stages:
            self._sent.popleft()[0].wait()


class PlannedStage(Stage):
    """A stage of a model that is not running: which layers it has is known."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index, self.num_stages = index, num_stages


def stage_layers(num_layers: int, num_stages: int, index: int) -> range:
    """Neighbouring layers, as many for each stage; where they cannot be, the first stages have one more: the last has the head."""
    share, more = divmod(num_layers, num_stages)
    start = index * share + min(index, more)
    return range(start, start + share + (index < more))
