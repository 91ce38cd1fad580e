"""The seam of sampling features: small objects the sampler iterates over, each with its own state a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence


class Feature(ABC):
    """Changes the logits of the sequences that asked for it, before a token is chosen.

    State is kept by seq_id, so that preemption and a change of row need no care.
    """

    @abstractmethod
    def wants(self, params: SamplingParams) -> bool:
        """Whether a sequence with these parameters needs this feature."""

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """A sequence begins."""

    @abstractmethod
    def remove(self, seq_id: int) -> None:
        """A sequence ended; unknown ids are ignored."""

    @abstractmethod
    def apply(self, logits: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        """Change rows of logits [L, V] float32 in place; `sequences` are the (row of the logits, sequence) pairs that asked."""

    def observe(self, token_ids: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        """The step's tokens [L], on the device, before the host knows them."""
        return
