"""The draft proposer `request`: drafts that requests supply, such as OpenAI's `prediction` or Triton's `draft_input_ids`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.base.config import LOOKUP_SIZES, MAX_DRAFT_TOKENS
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.plan import NO_DRAFTS
from stoker.runtime.schedule.proposers.proposer import Proposer
from stoker.runtime.schedule.proposers.token_index import TokenIndex


class SuppliedDrafts(Proposer):
    """Proposes the supplied tokens in order. After another token was generated, it continues where the newest tokens occur in them."""

    max_drafts = MAX_DRAFT_TOKENS
    reads_token_ids = True

    def waits(self, seq: Sequence) -> bool:
        return bool(self.propose(seq, 1))

    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        if not seq.request.draft_ids:
            return NO_DRAFTS
        if seq.proposal is None:
            seq.proposal = (TokenIndex(seq.request.draft_ids, start=0), seq.num_prompt)
        index: TokenIndex = seq.proposal[0]
        num_followed: int = seq.proposal[1]
        if num_followed < len(seq.tokens):
            index.follow(seq.tokens[num_followed:], seq.tokens[max(len(seq.tokens) - max(LOOKUP_SIZES), seq.num_prompt) :])
            seq.proposal = index, len(seq.tokens)
        return index.continuation(limit)
