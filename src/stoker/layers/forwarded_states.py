"""Hidden states that pipeline stages send along with the residual stream, because draft heads on the last stage read them.

A stage sends [x, states before the wanted layers of this and of earlier stages], stacked: [1 + number of states, T, width].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.distributed.pipeline import Stage


class ForwardedStates:
    """The states that one stage receives, observes and sends in a step. `layers`: the states before these layers are wanted, ascending."""

    def __init__(self, stage: Stage, num_layers: int, layers: Sequence[int] = ()) -> None:
        """`num_layers` is that of the model."""
        own = stage.layers(num_layers)
        self._stage, self._first = stage, own.start
        self._received = [number for number in layers if number < own.start]
        self._sent = [] if stage.is_last else [number for number in layers if number < own.stop]
        self._states: dict[int, Tensor] = {}

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The residual stream of this shape [T, width] from the previous stage."""
        if not self._received:
            return self._stage.receive(shape, dtype, device)
        x, *states = self._stage.receive((1 + len(self._received), *shape), dtype, device).unbind()
        self._states = dict(zip(self._received, states, strict=True))
        return x

    def pop_earlier(self) -> list[tuple[int, Tensor]]:
        """The received states, of the last stage, which are then released. Their numbers count layers from its first one: negative."""
        states, self._states = self._states, {}
        return [(number - self._first, state) for number, state in states.items()]

    def observe(self, num_layers: int, x: Tensor) -> None:
        """Keep the states `x` before layer `num_layers` of this stage, if a later stage wants them."""
        number = self._first + num_layers
        if number in self._sent:
            self._states[number] = x

    def send(self, x: Tensor) -> None:
        """Send the residual stream and the wanted states to the next stage. The states are then released."""
        self._stage.send(torch.stack([x, *(self._states[number] for number in self._sent)]) if self._sent else x)
        self._states = {}
