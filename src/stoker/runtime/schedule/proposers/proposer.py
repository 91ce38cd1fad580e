"""The interface of draft proposers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from stoker.runtime.request import Sequence


class Proposer(ABC):
    """Proposes draft tokens, which the model verifies in the step that computes the newest token of the sequence.

    max_drafts: the largest number of drafts per row; 0: the planner never calls `propose`.
    reads_token_ids: drafts are a function of token ids that the host knows, so `propose` is called only for sequences without a pending
        id, except where the device can look up or has computed drafts (`num_ahead`). A proposer that runs on the device sets False and
        returns -1 for each draft.

    runs_on_device: drafts are computed in the step before, so that a plan says how many the next step can verify (`StepPlan.num_wanted`).

    State of a sequence is stored in `Sequence.proposal`.
    """

    max_drafts: int
    reads_token_ids: bool
    runs_on_device = False

    def waits(self, seq: Sequence) -> bool:
        """Whether drafts are likely once the pending ids of `seq` are known, so that no step is planned before.

        Called only if `reads_token_ids`. If it returns False where no drafts are expected, the next step of a GPU is planned while the
        previous one runs.
        """
        return True

    def num_ahead(self, seq: Sequence, limit: int) -> int:
        """How many drafts, at most `limit`, the device proposes after the pending ids of `seq`. Called only if `Sequence.drafts_ahead`."""
        return 0

    @abstractmethod
    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        """At most `limit` (1 to max_drafts) ids of tokens that may follow the newest token of `seq`; -1 for ids only the device knows."""
