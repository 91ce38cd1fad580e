"""A minimum length: until it is reached, no id that would end the sequence can be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature


class MinTokens(Feature):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ends: dict[int, Tensor] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def add(self, seq: Sequence) -> None:
        self._ends[seq.seq_id] = torch.tensor(sorted(seq.end_ids), dtype=torch.long, device=self.device)

    def remove(self, seq_id: int) -> None:
        self._ends.pop(seq_id, None)

    def apply(self, logits: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        for row, seq in sequences:
            # The token being chosen is already counted as pending.
            if seq.num_generated - 1 < seq.min_tokens:
                logits[row].index_fill_(0, self._ends[seq.seq_id], float("-inf"))
