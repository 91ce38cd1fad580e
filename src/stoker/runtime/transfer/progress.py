"""What a rank has done to its KV cache: the layers that it has computed, which are read while the step still runs, and zeroed blocks."""

from __future__ import annotations

import threading
from typing import Any

import torch

RETAINED_STEPS = 8  # more than are in flight at the same time; older ones have ended


class StepProgress:
    """Counts the steps of one rank and their layers. One thread runs steps; others wait for layers.

    `num_planned` is the number of steps that were launched. On a CPU with pipeline stages they begin later.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.num_planned = 0
        self.num_zeroed = 0  # blocks that were zeroed or, on a GPU, whose zeroing was launched; in the same order on all ranks
        self._last_zeroing: Any = None  # on a GPU an event after it
        self._num_layers = num_layers
        self._is_cuda = device.type == "cuda"
        self._num_begun = 0
        self._layers: dict[int, list[Any]] = {}  # step → for each computed layer an event on a GPU, otherwise None
        self._changed = threading.Condition()

    def begin_step(self) -> None:
        """The next step begins."""
        with self._changed:
            self._num_begun += 1
            self._layers[self._num_begun] = []
            self._layers.pop(self._num_begun - RETAINED_STEPS, None)
            self._changed.notify_all()

    def end_layer(self) -> None:
        """The next layer of the step was computed or, on a GPU, launched."""
        self._append(1)

    def end_step(self) -> None:
        """All layers of the step were computed or launched."""
        self._append(self._num_layers)

    def wait(self, step: int, layer: int, timeout_s: float) -> bool:
        """Wait until `layer`, an index on this rank, of a step is computed. False after `timeout_s`. Steps up to 0 are complete."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_launched(step, layer), timeout_s):
                return False
            done = self._layers.get(step)
            event = done[layer] if done and len(done) > layer else None
        if event is not None:
            event.synchronize()
        return True

    def end_zeroing(self, num_blocks: int) -> None:
        """`num_blocks` blocks were zeroed or, on a GPU, their zeroing was launched."""
        event = self._record()
        with self._changed:
            self.num_zeroed += num_blocks
            self._last_zeroing = event
            self._changed.notify_all()

    def wait_for_zeroing(self, num_zeroed: int, timeout_s: float) -> bool:
        """Wait until the first `num_zeroed` blocks since the start are zero, so that they can be written. False after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_zeroed >= num_zeroed, timeout_s):
                return False
            event = self._last_zeroing
        if event is not None:
            event.synchronize()
        return True

    def _is_launched(self, step: int, layer: int) -> bool:
        """Whether the layer was computed or launched. A step before the newest one is over."""
        return step <= 0 or step < self._num_begun or len(self._layers.get(step, ())) > layer

    def _append(self, count: int) -> None:
        """Note up to `count` further layers of the newest step."""
        event = self._record()
        with self._changed:
            if (done := self._layers.get(self._num_begun)) is not None:
                done += [event] * min(count, self._num_layers - len(done))
            self._changed.notify_all()

    def _record(self) -> Any:
        """An event after what was launched on the GPU until now; None on a CPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
