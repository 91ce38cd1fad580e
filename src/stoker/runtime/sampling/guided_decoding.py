"""Guided decoding: bans the tokens that the grammar of a sequence does not allow next."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.types import Guide, SamplingParams
from stoker.runtime.request import ErrorInfo, Sequence
from stoker.runtime.sampling.feature import Feature, Pairs
from stoker.runtime.sampling.grammar_compiler import end_ids

# CPU seconds per token and sequence, during which all other requests wait. Common schemas take less than a millisecond. The time for
# ((a{1,50}){1,50}){1,50} grows with each token, to 1.1 s for the 70th.
MAX_MATCH_S = 0.5


class _Match:
    """The state of one sequence: the grammar matcher, and the number of tokens that it has read."""

    __slots__ = ("ends", "in_reasoning", "matcher", "num_read")

    def __init__(self, guide: Guide, matcher: Any, ends: frozenset[int]) -> None:
        self.matcher = matcher
        self.ends = ends
        self.num_read = 0
        self.in_reasoning = bool(guide.reasoning_end) and guide.reasoning_start is None


class Guides(Feature):
    """Bans tokens by one grammar matcher per sequence, which is retained through preemptions.

    It reads tokens on the host: the scheduler plans no step of such a sequence while an id is pending (Sequence.waits_for_ids).
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._matches: dict[int, _Match] = {}

    def applies_to(self, params: SamplingParams) -> bool:
        return params.guide is not None

    def add(self, seq: Sequence) -> None:
        """Create the matcher of the sequence's compiled grammar."""
        import xgrammar

        ends = end_ids(seq.request)
        matcher = xgrammar.GrammarMatcher(seq.grammar, override_stop_tokens=ends)
        self._matches[seq.seq_id] = _Match(_guide(seq), matcher, frozenset(ends))

    def remove(self, seq_id: int) -> None:
        self._matches.pop(seq_id, None)

    def gather(self, sequences: Pairs) -> list[np.ndarray]:
        """Row indices [n], and bit masks of the allowed tokens, int32 [n, ceil(V / 32)]."""
        import xgrammar

        masks = xgrammar.allocate_token_bitmask(len(sequences), self.vocab_size)
        for i, (_, seq) in enumerate(sequences):
            match, started = self._matches[seq.seq_id], time.thread_time()
            if not _read_new_tokens(match, seq):
                masks[i] = 0  # no token is allowed, so that the row yields an error
                continue
            if match.in_reasoning:
                masks[i] = -1  # any token but those that would end the sequence without an answer
                _set_bits(masks[i], match.ends, False)
                continue
            match.matcher.fill_next_token_bitmask(masks, i)
            if (start := _guide(seq).reasoning_start) is not None and not match.num_read:
                _set_bits(masks[i], [start], True)
            if (took := time.thread_time() - started) > MAX_MATCH_S:
                masks[i] = 0
                seq.fault = ErrorInfo("guide_too_slow", _too_slow(seq, took), 400)
                continue
            if match.matcher.is_completed() and _allows_only(masks[i], match.ends):
                seq.min_tokens = 0  # only an end id is allowed, even before the minimum length
        return [np.array([row for row, _ in sequences]), masks.numpy()]

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Set the logits of all tokens whose mask bit is 0 to -inf."""
        rows, masks = inputs
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_banned = (masks.unsqueeze(2) >> bits & 1).flatten(1)[:, : self.vocab_size] == 0
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(is_banned, float("-inf")))


def _too_slow(seq: Sequence, took_s: float) -> str:
    """The error message for a sequence whose matcher took too long for one token."""
    kind, index = seq.params.guide.kind if seq.params.guide is not None else "", len(seq.tokens) - seq.num_prompt
    return (
        f"guided decoding: the {kind} took {took_s:.2f} s for token {index}, and may take {MAX_MATCH_S:g} s. Use fewer nested repetitions."
    )


def _read_new_tokens(match: _Match, seq: Sequence) -> bool:
    """Advance the matcher to the newest token of `seq`. False if it does not accept a token, or if no token may follow."""
    generated = len(seq.tokens) - seq.num_prompt
    guide = _guide(seq)
    while match.num_read < generated:
        token = seq.tokens[seq.num_prompt + match.num_read]
        if match.in_reasoning:
            match.in_reasoning = not _ends_with(seq, seq.num_prompt + match.num_read + 1, guide.reasoning_end)
        elif not match.num_read and token == guide.reasoning_start:
            match.in_reasoning = True
        elif match.matcher.is_terminated() or not match.matcher.accept_token(token):
            return False
        match.num_read += 1
    return not match.matcher.is_terminated()


def _allows_only(mask: Tensor, token_ids: frozenset[int]) -> bool:
    """Whether a bit mask (int32 words) allows no token except `token_ids`."""
    others = mask.clone()
    _set_bits(others, token_ids, False)
    return not bool(torch.any(others))


def _set_bits(mask: Tensor, token_ids: Iterable[int], value: bool) -> None:
    """Set the bits of tokens in a row of int32 words."""
    for token in token_ids:
        bit = torch.tensor(1 << (token % 32) if token % 32 < 31 else -(1 << 31), dtype=torch.int32)
        mask[token // 32] = mask[token // 32] | bit if value else mask[token // 32] & ~bit


def _ends_with(seq: Sequence, length: int, token_ids: tuple[int, ...]) -> bool:
    """Whether the first `length` tokens of `seq` end with `token_ids`, all of which were generated."""
    start = length - len(token_ids)
    return start >= seq.num_prompt and tuple(seq.tokens[start:length]) == token_ids


def _guide(seq: Sequence) -> Guide:
    """The guide of a sequence that uses this feature."""
    assert seq.params.guide is not None
    return seq.params.guide
