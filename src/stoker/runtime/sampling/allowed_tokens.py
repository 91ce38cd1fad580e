"""Allowed tokens: a sequence generates no others."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature, SampledRow


class AllowedTokens(Feature):
    """Sets the logits of all tokens to -inf, except those that the request lists."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._allowed: dict[int, np.ndarray] = {}

    def applies_to(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def add(self, seq: Sequence) -> None:
        """Convert the allowed ids to an array once."""
        self._allowed[seq.seq_id] = np.unique(np.array(seq.params.allowed_token_ids, dtype=np.int64))

    def remove(self, seq_id: int) -> None:
        self._allowed.pop(seq_id, None)

    def gather(self, rows: list[SampledRow]) -> list[np.ndarray]:
        """Row indices [n], and the indices of the rows' allowed tokens in the flattened logits."""
        positions = [row.at * self.vocab_size + self._allowed[row.seq.seq_id] for row in rows]
        return [np.array([row.at for row in rows]), np.concatenate(positions)]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Set the logits of all other tokens to -inf."""
        rows, positions = inputs
        allowed = logits.view(-1).index_select(0, positions)
        logits.index_fill_(0, rows, float("-inf"))
        logits.view(-1).index_copy_(0, positions, allowed)
