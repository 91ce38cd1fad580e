"""The seam of sampling features: small objects the sampler iterates over, each with its own state a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence

Pairs = list[tuple[int, Sequence]]  # (row of the logits, sequence) of those that asked for a feature


class Feature(ABC):
    """Changes the logits of the sequences that asked for it, before a token is chosen.

    The host's half of a step is `gather`; what it returns goes over in one copy with what the other features need. The device's half,
    `apply` and `observe`, only launches: it copies nothing from the host and waits for nothing (a Python number stored through an index
    would do both). State is kept by seq_id, so that preemption and a change of row need no care.
    """

    @abstractmethod
    def wants(self, params: SamplingParams) -> bool:
        """Whether a sequence with these parameters needs this feature."""

    def add(self, seq: Sequence) -> None:
        """A sequence begins."""
        return

    def remove(self, seq_id: int) -> None:
        """A sequence ended; unknown ids are ignored."""
        return

    @abstractmethod
    def gather(self, sequences: Pairs) -> list[np.ndarray]:
        """What the step needs on the device."""

    @abstractmethod
    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Change contiguous logits [L, V] float32 in place; `inputs` are what `gather` returned."""

    def observe(self, token_ids: Tensor, *inputs: Tensor) -> None:
        """The step's tokens [L], on the device, before the host knows them."""
        return


class Ban(Feature):
    """A feature that takes tokens out of the choice."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def banned(self, seq: Sequence) -> Iterable[int]:
        """What `seq` cannot choose now. Ids beyond the vocabulary can never be chosen anyway."""

    def gather(self, sequences: Pairs) -> list[np.ndarray]:
        size = self.vocab_size
        return [np.array([row * size + token for row, seq in sequences for token in self.banned(seq) if 0 <= token < size], dtype=np.int64)]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        (places,) = inputs
        logits.view(-1).index_fill_(0, places, float("-inf"))
