"""Pipeline stages forward the hidden states that draft heads on the last stage read."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.distributed.pipeline import Stage
from stoker.layers.forwarded_states import ForwardedStates


class QueuedStage(Stage):
    """A stage of three whose link to the next one is a list."""

    def __init__(self, index: int, link: list[Tensor]) -> None:
        self.index, self.num_stages, self.link = index, 3, link

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        x = self.link.pop()
        assert x.shape == shape
        return x

    def send(self, x: Tensor) -> None:
        self.link.append(x)


def test_states_of_two_stages_reach_the_third() -> None:
    """Six layers that each add one. The state before layer 2 is the first of stage 1, and that before layer 5 is one of the last stage."""
    link: list[Tensor] = []
    for layers, expected in (([0, 1, 2, 3, 5], [0, 1, 2, 3]), ([2], [2]), ([5], []), ([], [])):
        for index in range(3):
            stage = QueuedStage(index, link)
            forwarded = ForwardedStates(stage, 6, layers)
            x = torch.zeros(4, 3) if stage.is_first else forwarded.receive((4, 3), torch.float32, torch.device("cpu"))
            for i in range(2):
                forwarded.observe(i, x)
                x = x + 1
            forwarded.observe(2, x)
            if not stage.is_last:
                forwarded.send(x)
        assert [(4 + number, state.unique().tolist()) for number, state in forwarded.pop_earlier()] == [(n, [n]) for n in expected]
        assert x.shape == (4, 3) and x.unique().tolist() == [6] and not link
