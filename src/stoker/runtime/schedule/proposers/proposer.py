"""The interface of draft proposers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from stoker.runtime.request import Sequence


class Proposer(ABC):
    """Proposes draft tokens, which the model verifies in the step that computes the newest token of the sequence.

    max_drafts: the largest number of drafts per row; 0: the planner never calls `propose`.
    reads_token_ids: drafts are a function of token ids that the host knows. A sequence is then not planned again before its step is
        committed. A proposer that runs on the device sets False and returns -1 for each draft.
    """

    max_drafts: int
    reads_token_ids: bool

    @abstractmethod
    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        """At most `limit` (1 to max_drafts) ids of tokens that may follow the newest token of `seq`; -1 for ids only the device knows."""
