"""Verification of draft tokens: which of them the sampled tokens confirm, on the device.

A sequence with k drafts has k + 1 rows of logits: after its newest token, and after each draft. A token is sampled in each row, with the
random number of its position, as if the drafts before it were the sequence's tokens. A draft is accepted while it equals the token that was
sampled in the row before it. The sequence yields the accepted drafts and the token sampled after them, which are exactly the tokens that
one step per token yields:

    row       0     1     2     3          drafts    b  c  x
    sampled   b     c     d     ·          accepted  b  c
    yields    b     c     d
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels import ops
from stoker.runtime.staging import copy_to_host


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step with T tokens, S sequences that sample, L rows of logits and at most K drafts per sequence."""

    token_ids: Tensor  # int32 [T], the tokens of the step; the drafts of a sequence are the last ones
    logits_idx: Tensor  # int32 [L], the token of each row
    starts: Tensor  # int32 [S + 1], the first row of each sequence, and L
    owners: Tensor  # int32 [L], the sequence of each row
    max_drafts: int  # K

    def before(self) -> Tensor:
        """The drafts before each row, the newest first: int32 [L, K]; -1: none."""
        rows = torch.arange(len(self.owners), dtype=torch.int32, device=self.owners.device)
        steps = torch.arange(self.max_drafts, dtype=torch.int32, device=self.owners.device)
        num_before = rows - self.starts.index_select(0, self.owners)
        index = (self.logits_idx.unsqueeze(1) - steps).clamp(min=0)
        return torch.where(steps < num_before.unsqueeze(1), self.token_ids[index.long()].to(torch.int32), -1)


@dataclass(frozen=True, slots=True)
class Verified:
    """What S sequences yield: `token_ids[s, : num_accepted[s] + 1]`."""

    token_ids: Tensor  # int32 [S, K + 1]; -1 after the yielded tokens, and for a token that could not be sampled
    num_accepted: Tensor  # int32 [S], the accepted drafts
    newest: Tensor  # int32 [S], the last yielded token of each sequence

    def to_host(self, count: int) -> Verified:
        """Start to copy what `to_lists` reads of the first `count` sequences. The values are valid when the step has ended."""
        return Verified(copy_to_host(self.token_ids[:count]), copy_to_host(self.num_accepted[:count]), self.newest)

    def to_lists(self) -> list[list[int]]:
        """The ids that each sequence yields, after the copy has ended."""
        return [ids[: count + 1] for ids, count in zip(self.token_ids.tolist(), self.num_accepted.tolist(), strict=True)]

    def is_yielded(self, drafts: StepDrafts) -> Tensor:
        """Whether the token of each row is yielded, bool [L]."""
        rows = torch.arange(len(drafts.owners), dtype=torch.int32, device=drafts.owners.device)
        return rows <= (drafts.starts[:-1] + self.num_accepted).index_select(0, drafts.owners)


def verify(sampled: Tensor, drafts: StepDrafts) -> Verified:
    """Accept drafts while they equal the tokens `sampled`, int32 [L], in the rows before them."""
    return Verified(*ops.verify(sampled, drafts.token_ids, drafts.logits_idx, drafts.starts, drafts.max_drafts))
