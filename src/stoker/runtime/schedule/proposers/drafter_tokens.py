"""The draft proposer `drafter`: tokens that a draft engine or a draft head computed in the previous step of the sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.base.config import MAX_DRAFT_TOKENS
from stoker.base.draft_tree import PARENT_SHIFT
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import NO_DRAFTS
from stoker.runtime.schedule.proposers.proposer import Proposer

_TOKEN_BITS = (1 << PARENT_SHIFT) - 1  # the others are the parent in a dynamic tree, see `Planner`


class DrafterTokens(Proposer):
    """Proposes the drafts that the results of a step contain, which the executor stores in `Sequence.proposal`."""

    max_drafts = MAX_DRAFT_TOKENS
    reads_token_ids = True
    runs_on_device = True

    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        return NO_DRAFTS if seq.proposal is None else [draft & _TOKEN_BITS for draft in seq.proposal[:limit]]

    def num_ahead(self, seq: Sequence, limit: int) -> int:
        return min(limit, seq.num_drafted)
