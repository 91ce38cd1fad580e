"""Logit biases by token id."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature, SampledRow

_MAX_BIAS = 1e30  # sums stay within float32: an infinite logit would leave no probability for other tokens


class LogitBias(Feature):
    """Adds a bias to the logits of listed tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def applies_to(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def add(self, seq: Sequence) -> None:
        """Convert the biases to arrays once."""
        biases = seq.params.logit_bias
        values = np.fromiter(biases.values(), np.float64, len(biases)).clip(-_MAX_BIAS, _MAX_BIAS)
        self._biases[seq.seq_id] = (np.fromiter(biases, np.int64, len(biases)), values.astype(np.float32))

    def remove(self, seq_id: int) -> None:
        self._biases.pop(seq_id, None)

    def gather(self, rows: list[SampledRow]) -> list[np.ndarray]:
        """The indices of the biased tokens in the flattened logits [L × V], and their biases."""
        indices = [row.at * self.vocab_size + self._biases[row.seq.seq_id][0] for row in rows]
        values = [self._biases[row.seq.seq_id][1] for row in rows]
        return [np.concatenate(indices), np.concatenate(values)]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Add the biases."""
        indices, values = inputs
        logits.view(-1).index_add_(0, indices, values)
