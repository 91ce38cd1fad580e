"""Speculative sampling (Leviathan et al., 2023) of drafts whose logits a request supplies.

A draft d was sampled from the distribution q, and the model samples from p. With a random number u of the position, the token is d if
u × q(d) < p(d), and otherwise it is drawn from max(p - q, 0), scaled to a sum of 1. Its distribution is p, and it is d with the largest
probability that is possible: the sum over all tokens of min(p, q). The token replaces the one that was sampled without q, so that the draft
is accepted if both are equal, as always.

q is the softmax of the supplied logits. It is the distribution of a draft only while the answer consists of the drafts before it, and if
nothing else decides which drafts are verified: only the proposer `request` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.kernels.reference.sampling import threshold, uniform
from stoker.kernels.types import DrawParams
from stoker.runtime.request import Sequence

_SECOND = 0x5DEECE66D  # combined with the seed for a second random number of the same position


class DraftLogits(NamedTuple):
    """The supplied logits of M rows."""

    rows: list[int]  # of the logits of the step
    drafts: list[int]  # the draft after each row
    logits: np.ndarray  # float32 [M, vocab], of each draft

    def apply(self, token_ids: Tensor, logits: Tensor, params: DrawParams) -> Tensor:
        """`token_ids` [L] with those of the rows drawn anew, from the model's `logits` [L, V] after all features."""
        device = logits.device
        rows = torch.tensor(self.rows, device=device)
        columns = ("temperature", "top_k", "top_p", "min_p", "seeds")
        picked = {name: getattr(params, name).index_select(0, rows) for name in columns}
        drawn = draw_with_drafts(
            logits.index_select(0, rows),
            DrawParams(**picked, counters=params.counters.index_select(0, rows), all_greedy=False),
            torch.tensor(self.drafts, device=device),
            torch.from_numpy(self.logits).to(device),
        )
        before = token_ids.index_select(0, rows)
        return token_ids.index_copy(0, rows, torch.where(before < 0, before, drawn))


def uses_draft_logits(seq: Sequence) -> bool:
    """Whether the request supplies logits that affect the draws of a sequence. Greedy sequences do not draw."""
    return bool(seq.request.draft_logits) and not seq.params.greedy


def supplied_logits(sequences: list[Sequence], drafts: list[Seq[int]], vocab_size: int) -> DraftLogits | None:
    """The supplied logits of the drafts of a step; None if there are none."""
    rows: list[int] = []
    ids: list[int] = []
    parts: list[np.ndarray] = []
    first = 0
    for seq, tokens in zip(sequences, drafts, strict=True):
        if tokens and uses_draft_logits(seq):
            supplied, generated = seq.request.draft_ids, seq.tokens[seq.num_prompt :]
            start = len(generated)
            if [*generated, *tokens] == supplied[: start + len(tokens)]:
                rows += range(first, first + len(tokens))
                ids += tokens
                logits = np.frombuffer(seq.request.draft_logits, np.float32).reshape(-1, vocab_size)
                parts.append(logits[start : start + len(tokens)])
        first += 1 + len(tokens)
    return DraftLogits(rows, ids, np.concatenate(parts)) if rows else None


def draw_with_drafts(logits: Tensor, params: DrawParams, drafts: Tensor, draft_logits: Tensor) -> Tensor:
    """The token ids, int32 [M], of rows with the model's logits [M, V] and drafts [M] from the softmax of `draft_logits` [M, V]."""
    probs = torch.softmax(logits.float() / params.temperature.clamp(min=1e-6).unsqueeze(1), dim=-1)
    probs = (probs * (probs >= threshold(probs, params).unsqueeze(1))).double()
    probs /= probs.sum(dim=-1, keepdim=True)
    proposed = torch.softmax(draft_logits.double(), dim=-1)
    at = drafts.long().unsqueeze(1)
    number = uniform(params.seeds, params.counters).double()
    is_accepted = number * proposed.gather(1, at).squeeze(1) < probs.gather(1, at).squeeze(1)
    rest = (probs - proposed).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, probs)  # equal distributions reject nothing but rounding errors
    cumulative = rest.cumsum(dim=-1)
    target = uniform(params.seeds ^ _SECOND, params.counters).double() * cumulative[:, -1]
    others = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    return torch.where(is_accepted, drafts.long(), others).to(torch.int32)
