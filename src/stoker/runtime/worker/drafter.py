"""The interface of draft models and heads: they run on the device after the sampler, and the host does not wait for their drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.sampling.verification import Verified


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a drafter reads: the step that was computed, with S sequences that sampled. All tensors are on the device."""

    batch: ForwardBatch  # all ids are resolved
    rows: Tensor  # int32 [S], the index of each sequence in the device buffers
    newest: Tensor  # int32 [S], the newest token of each sequence, which is not computed yet
    verified: Verified | None  # the accepted drafts; None if the step had no drafts: then each sequence has one row of logits


class Drafter(ABC):
    """Computes `num_drafts` draft tokens for each sequence of a step.

    The scheduler uses a proposer with `reads_token_ids = False`, whose ids are -1. The inputs of the next step refer to the drafts in the
    memory of the device (`ModelRunner.last_ids`).
    """

    num_drafts: int

    @abstractmethod
    def draft(self, inputs: DraftInputs) -> Tensor:
        """The drafts that follow the newest token of each sequence: int32 [S, num_drafts]. It must not wait for the device."""
