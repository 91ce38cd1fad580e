"""The interface of sampling features, over which the sampler iterates. Each has its own state per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence

Pairs = list[tuple[int, Sequence]]  # (row of the logits, sequence) of the sequences that use a feature


class Feature(ABC):
    """Changes the logits of the sequences that use it, before a token is sampled.

    `gather` runs on the host; the arrays of all features are copied to the device with one copy. `apply` and `observe` only launch kernels:
    they must not copy from the host or wait for the device (assigning a Python number through an index does both). State is stored by
    seq_id, so that preemption and a change of row do not affect it.
    """

    @abstractmethod
    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a sequence with these parameters uses this feature."""

    def add(self, seq: Sequence) -> None:
        """Called before the first step of a sequence that uses the feature."""
        return

    def remove(self, seq_id: int) -> None:
        """Called when a sequence has ended. Unknown ids are ignored."""
        return

    @abstractmethod
    def gather(self, sequences: Pairs) -> list[np.ndarray]:
        """The arrays that `apply` and `observe` need on the device.

        `sequences` are (row, sequence) pairs of this step that use the feature.
        """

    @abstractmethod
    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Change contiguous logits [L, V] float32 in place. `inputs` are the arrays of `gather`, on the device."""

    def observe(self, token_ids: Tensor, *inputs: Tensor) -> None:
        """Called after sampling with the token ids [L], which are on the device, and the arrays of `gather`."""
        return


class Ban(Feature):
    """A feature that bans tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def banned(self, seq: Sequence) -> Iterable[int]:
        """The token ids that are banned as the next token of `seq`. Ids outside the vocabulary are ignored."""

    def gather(self, sequences: Pairs) -> list[np.ndarray]:
        """The indices of the banned tokens in the flattened logits [L × V]."""
        size = self.vocab_size
        return [np.array([row * size + token for row, seq in sequences for token in self.banned(seq) if 0 <= token < size], dtype=np.int64)]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Set the logits of the banned tokens to -inf."""
        (indices,) = inputs
        logits.view(-1).index_fill_(0, indices, float("-inf"))
