"""The draft proposer `none`: every row has one token per step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import NO_DRAFTS
from stoker.runtime.schedule.proposers.proposer import Proposer


class NoDrafts(Proposer):
    """Proposes nothing."""

    max_drafts = 0
    reads_token_ids = False

    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        return NO_DRAFTS
