"""Answers that must match a grammar: what it does not allow next is never drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.base.types import SamplingParams
from stoker.runtime.request import Sequence
from stoker.runtime.sampling.feature import Feature
from stoker.runtime.sampling.grammars import end_ids


class _Match:
    """How far a sequence's grammar has read its answer."""

    __slots__ = ("ends", "matcher", "num_read")

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self.matcher = matcher
        self.ends = ends
        self.num_read = 0


class Guides(Feature):
    """A matcher a sequence, kept through preemptions. It catches up with the tokens that the host knows, which are all: the scheduler
    plans no step of such a sequence while an id is pending (Sequence.waits_for_ids)."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._matches: dict[int, _Match] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.guide is not None

    def add(self, seq: Sequence) -> None:
        import xgrammar

        ends = end_ids(seq.request)
        matcher = xgrammar.GrammarMatcher(seq.grammar, override_stop_tokens=ends)
        self._matches[seq.seq_id] = _Match(matcher, frozenset(ends))

    def remove(self, seq_id: int) -> None:
        self._matches.pop(seq_id, None)

    def apply(self, logits: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        import xgrammar

        masks = xgrammar.allocate_token_bitmask(logits.shape[0], self.vocab_size)
        for row, seq in sequences:
            match = self._matches[seq.seq_id]
            if not _catch_up(match, seq):
                masks[row] = 0  # nothing may follow: the row is seen to be broken
                continue
            match.matcher.fill_next_token_bitmask(masks, row)
            if match.matcher.is_completed() and _allows_only(masks[row], match.ends):
                seq.min_tokens = 0  # the grammar has ended; no more tokens can come
        xgrammar.apply_token_bitmask_inplace(
            logits, masks.to(logits.device), vocab_size=self.vocab_size, indices=[row for row, _ in sequences]
        )


def _catch_up(match: _Match, seq: Sequence) -> bool:
    generated = len(seq.tokens) - seq.num_prompt
    while match.num_read < generated:
        if match.matcher.is_terminated() or not match.matcher.accept_token(seq.tokens[seq.num_prompt + match.num_read]):
            return False
        match.num_read += 1
    return not match.matcher.is_terminated()


def _allows_only(mask: Tensor, token_ids: frozenset[int]) -> bool:
    """Whether no other bit is set in a row of int32 words."""
    others = mask.clone()
    for token in token_ids:
        others[token // 32] &= ~(1 << (token % 32)) if token % 32 < 31 else 0x7FFFFFFF
    return not bool(torch.any(others))
