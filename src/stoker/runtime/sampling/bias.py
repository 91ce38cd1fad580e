"""Logit biases by token id."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature


class LogitBias(Feature):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def add(self, seq: Sequence) -> None:
        ids = torch.tensor(list(seq.params.logit_bias), dtype=torch.long, device=self.device)
        # Within float32, sums included: an infinite logit would leave no probability to the others.
        values = torch.tensor(list(seq.params.logit_bias.values()), dtype=torch.float64).clamp(-1e30, 1e30).float().to(self.device)
        self._biases[seq.seq_id] = (ids, values)

    def remove(self, seq_id: int) -> None:
        self._biases.pop(seq_id, None)

    def apply(self, logits: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        for row, seq in sequences:
            ids, values = self._biases[seq.seq_id]
            logits[row].index_add_(0, ids, values)
