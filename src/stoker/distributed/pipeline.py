"""Pipeline stages: each holds some of the layers, receives the hidden states from the previous stage and sends them to the next."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.distributed.collectives import CHECK_INTERVAL, keep_group


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

    def __init__(
        self, inner: dist.ProcessGroup, index: int, num_stages: int, ranks_per_stage: int, check: Callable[[], None] | None = None
    ) -> None:
        """`check`: called while this stage waits on a CPU for a stage on another host, and raises if that has failed. None: all ranks are
        on one host."""
        self.index, self.num_stages = index, num_stages
        self._inner = inner
        self._receiver = Receiver(inner, check) if check is not None else None
        # Sends that the receiver may not have received yet. On a CPU, this stage continues with the next step meanwhile.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._previous, self._next = inner.rank() - ranks_per_stage, inner.rank() + ranks_per_stage

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive a tensor of this shape from the previous stage."""
        x = torch.empty(shape, dtype=dtype, device=device)
        work = self._inner.recv([x], self._previous, 0)
        if self._receiver is None:
            work.wait()
        else:
            self._receiver.wait(work)
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


class Receiver:
    """Waits for receives in a thread, because gloo cannot end a wait without ending all connections.

    A connection to a host that cannot be reached is not closed, so that a wait for it would not end.
    """

    def __init__(self, inner: dist.ProcessGroup, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="receive", daemon=True).start()

    def wait(self, work: Any) -> None:
        """Wait for a receive. Raises what the receive or `check` raises."""
        self._waiting.put(work)
        while True:
            try:
                error = self._ended.get(timeout=CHECK_INTERVAL.total_seconds())
            except queue.Empty:
                try:
                    self._check()
                except Exception:
                    keep_group(self._inner)
                    raise
                continue
            if error is not None:
                raise error
            return

    def _run(self) -> None:
        """The loop of the thread."""
        while True:
            work = self._waiting.get()
            try:
                work.wait()
            except Exception as error:
                self._ended.put(error)
            else:
                self._ended.put(None)


class PlannedStage(Stage):
    """A stage of a model that does not run, for example to compute its layers or sizes."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index, self.num_stages = index, num_stages


def stage_layers(num_layers: int, num_stages: int, index: int) -> range:
    """The layers of a stage: a consecutive range, evenly divided. The first stages get the remainder, because the last one has the head."""
    size, remainder = divmod(num_layers, num_stages)
    start = index * size + min(index, remainder)
    return range(start, start + size + (index < remainder))
