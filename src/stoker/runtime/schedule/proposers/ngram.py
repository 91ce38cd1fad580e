"""The draft proposer `ngram`: prompt lookup. It proposes what followed the newest tokens earlier in the prompt or in the answer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

from stoker.base.config import LOOKUP_SIZES, MAX_DRAFT_TOKENS
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.proposers.proposer import Proposer
from stoker.runtime.schedule.proposers.token_index import TokenIndex

MAX_PROMPT = 1 << 15  # newest tokens of a prompt that are indexed: about 10 MB and 15 ms


class NgramProposer(Proposer):
    """Copies from the sequence itself, and from the drafts that the request supplies (Saxena, prompt lookup decoding, 2023)."""

    max_drafts = MAX_DRAFT_TOKENS
    reads_token_ids = True

    def waits(self, seq: Sequence) -> bool:
        return bool(self._index(seq).continuation(1))

    def propose(self, seq: Sequence, limit: int) -> Seq[int]:
        return self._index(seq).repetition(limit)

    def num_ahead(self, seq: Sequence, limit: int) -> int:
        """As many as follow the newest known token: while a passage is copied, the pending tokens are part of it."""
        return len(self._index(seq).repetition(limit))

    def _index(self, seq: Sequence) -> TokenIndex:
        """The index of the sequence, which includes its newest known token."""
        supplied, tokens = seq.request.draft_ids, seq.tokens
        if seq.proposal is None:
            first = max(seq.num_prompt - MAX_PROMPT, 0)
            seq.proposal = (TokenIndex([*supplied, *tokens[first : seq.num_prompt]], start=0 if supplied else -1), first - len(supplied))
        index, offset = seq.proposal
        num_known = len(index.text) + offset
        if num_known < len(tokens) or num_known == seq.num_prompt:
            new = tokens[num_known:]
            index.append(new)
            index.follow(new, tokens[-max(LOOKUP_SIZES) :])
        return cast("TokenIndex", index)
