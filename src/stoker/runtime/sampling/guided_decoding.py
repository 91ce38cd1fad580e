"""Guided decoding: bans the tokens that the grammar of a sequence does not allow next."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.base.types import Guide, SamplingParams
from stoker.runtime.request import ErrorInfo, Sequence
from stoker.runtime.sampling.feature import Feature, SampledRow
from stoker.runtime.sampling.grammar_compiler import end_ids

# CPU seconds per token and sequence, during which all other requests wait. Common schemas take less than a millisecond. The time for
# ((a{1,50}){1,50}){1,50} grows with each token, to 1.1 s for the 70th.
MAX_MATCH_S = 0.5
DRAFTS_MATCH_S = 0.05  # CPU seconds for all drafts of a sequence in one step, each of which takes as long as a token


_State = tuple[int, int, bool, tuple[int, ...]]  # of a _Match


class _Match:
    """The state of one sequence: the grammar matcher, and the tokens that it has read."""

    __slots__ = ("_end", "_start", "ends", "in_reasoning", "matcher", "newest", "num_matched", "num_read")

    def __init__(self, guide: Guide, matcher: Any, ends: frozenset[int]) -> None:
        self.matcher = matcher
        self.ends = ends
        self.num_read = 0
        self.num_matched = 0  # tokens that the matcher has read: all but those of the reasoning
        self.in_reasoning = bool(guide.reasoning_end) and guide.reasoning_start is None
        self.newest: tuple[int, ...] = ()  # at most as many as the marker of the end of the reasoning has
        self._start, self._end = guide.reasoning_start, guide.reasoning_end

    def accept(self, token: int) -> bool:
        """Read the next generated token. False if the grammar does not allow it; the state is unchanged then."""
        if not (self.in_reasoning or self._starts_reasoning(token)):
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self.num_matched += 1
        if self._end:
            self.newest = (*self.newest, token)[-len(self._end) :]
            self.in_reasoning = (self.in_reasoning or self._starts_reasoning(token)) and self.newest != self._end
        self.num_read += 1
        return True

    def state(self) -> _State:
        """The state that `restore` accepts."""
        return self.num_read, self.num_matched, self.in_reasoning, self.newest

    def restore(self, state: _State) -> None:
        """Return to an earlier state."""
        surplus = self.num_matched - state[1]
        if surplus:
            self.matcher.rollback(surplus)
        self.num_read, self.num_matched, self.in_reasoning, self.newest = state

    def _starts_reasoning(self, token: int) -> bool:
        """Whether `token`, as the next one, starts the reasoning."""
        return not self.num_read and token == self._start


class Guides(Feature):
    """Bans tokens by one grammar matcher per sequence, which is retained through preemptions.

    It reads tokens on the host: the scheduler plans no step of such a sequence while an id is pending (Sequence.waits_for_ids). The matcher
    reads the drafts of a step to find the masks of the rows after them, and is rolled back to the known tokens. In a tree it is rolled back
    to the last common ancestor of a row and the row before it.
    """

    reads_tokens = True

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

    def gather(self, rows: list[SampledRow]) -> list[np.ndarray]:
        """Row indices [n], and bit masks of the allowed tokens, int32 [n, ceil(V / 32)]."""
        import xgrammar

        masks = xgrammar.allocate_token_bitmask(len(rows), self.vocab_size)  # every token is allowed
        first = 0
        while first < len(rows):
            end = first + 1
            while end < len(rows) and rows[end].seq is rows[first].seq:
                end += 1
            self._fill(masks[first:end], rows[first:end])
            first = end
        return [np.array([row.at for row in rows]), masks.numpy()]

    def _fill(self, masks: Tensor, rows: list[SampledRow]) -> None:
        """Write the masks of the rows of one sequence, and limit the number of its next drafts.

        Rows after a draft that the grammar rejects are never reached.
        """
        seq = rows[0].seq
        match, started = self._matches[seq.seq_id], time.thread_time()
        seq.fault, seq.min_tokens = None, seq.params.min_tokens
        if not all(match.accept(token) for token in seq.tokens[seq.num_prompt + match.num_read :]) or match.matcher.is_terminated():
            masks[0] = 0  # no token is allowed, so that the row yields an error
            return
        states, path, slowest = [match.state()], list[int](), 0.0  # the matcher's state after each number of drafts of `path`
        for i, row in enumerate(rows):
            if not _follow(match, states, path, row.drafts):
                continue
            self._fill_row(masks, i, match, row)
            if (took := time.thread_time() - started) > MAX_MATCH_S:
                masks[i:] = 0  # in a tree, later rows may be reached without this one
                seq.fault = ErrorInfo("guide_too_slow", _too_slow(row, took), 400)
                break
            started, slowest = time.thread_time(), max(slowest, took)
        seq.draft_limit = int(DRAFTS_MATCH_S / slowest) if slowest else None
        match.restore(states[0])

    def _fill_row(self, masks: Tensor, index: int, match: _Match, row: SampledRow) -> None:
        """Write the mask of one row, up to which the matcher has read. Lowers the minimum length if only an end id is allowed."""
        mask, guide = masks[index], _guide(row.seq)
        if match.in_reasoning:
            _set_bits(mask, match.ends, False)  # any token but those that would end the sequence without an answer
            return
        match.matcher.fill_next_token_bitmask(masks, index)
        if guide.reasoning_start is not None and not match.num_read:
            _set_bits(mask, [guide.reasoning_start], True)
        if match.matcher.is_completed() and _allows_only(mask, match.ends):
            row.seq.min_tokens = min(row.seq.min_tokens, row.num_generated)

    def apply(self, logits: Tensor, *inputs: Tensor) -> None:
        """Set the logits of all tokens whose mask bit is 0 to -inf."""
        rows, masks = inputs
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_banned = (masks.unsqueeze(2) >> bits & 1).flatten(1)[:, : self.vocab_size] == 0
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(is_banned, float("-inf")))


def _follow(match: _Match, states: list[_State], path: list[int], drafts: Seq[int]) -> bool:
    """Make the matcher read `drafts` instead of those in `path`. False if the grammar rejects one of them, or ends before the last.

    `states` are those of the matcher, after the first drafts of `path`, and after each of them.
    """
    num_common = next((i for i, (old, new) in enumerate(zip(path, drafts, strict=False)) if old != new), min(len(path), len(drafts)))
    match.restore(states[num_common])
    del path[num_common:], states[num_common + 1 :]
    for token in drafts[num_common:]:
        if not match.accept(token) or match.matcher.is_terminated():
            match.restore(states[-1])
            return False
        path.append(token)
        states.append(match.state())
    return True


def _too_slow(row: SampledRow, took_s: float) -> str:
    """The error message for a sequence whose matcher took too long for one token."""
    return (
        f"guided decoding: the {_guide(row.seq).kind} took {took_s:.2f} s for token {row.num_generated}, and may take {MAX_MATCH_S:g} s. "
        "Use fewer nested repetitions."
    )


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


def _guide(seq: Sequence) -> Guide:
    """The guide of a sequence that uses this feature."""
    assert seq.params.guide is not None
    return seq.params.guide
