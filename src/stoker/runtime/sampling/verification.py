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

from stoker.runtime.staging import copy_to_host


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step with S sequences that sample, L rows of logits and at most K drafts per sequence."""

    starts: Tensor  # int32 [S + 1], the first row of each sequence, and L
    owners: Tensor  # int32 [L], the sequence of each row
    before: Tensor  # int32 [L, K], the drafts before each row, the newest first; -1: none
    after: Tensor  # int32 [L], the draft that follows each row; -1: none

    @staticmethod
    def of(token_ids: Tensor, logits_idx: Tensor, starts: Tensor, owners: Tensor, max_drafts: int) -> StepDrafts:
        """Find the drafts among the tokens [T] of a step. `logits_idx` [L] is the token of each row, `max_drafts` is K."""
        rows = torch.arange(len(owners), dtype=torch.int32, device=owners.device)
        steps = torch.arange(max_drafts, dtype=torch.int32, device=owners.device)
        num_before = rows - starts.index_select(0, owners)
        index = (logits_idx.unsqueeze(1) - steps).clamp(min=0)
        before = torch.where(steps < num_before.unsqueeze(1), token_ids[index.long()].to(torch.int32), -1)
        is_last = rows + 1 == starts.index_select(0, owners + 1)
        following = token_ids.index_select(0, (logits_idx + 1).clamp(max=len(token_ids) - 1)).to(torch.int32)
        return StepDrafts(starts, owners, before, torch.where(is_last, -1, following))


@dataclass(frozen=True, slots=True)
class Verified:
    """What S sequences yield: `token_ids[s, : num_accepted[s] + 1]`."""

    token_ids: Tensor  # int32 [S, K + 1]; -1 after the yielded tokens, and for a token that could not be sampled
    num_accepted: Tensor  # int32 [S], the accepted drafts
    newest: Tensor  # int32 [S], the last yielded token of each sequence
    by_row: Tensor  # int32 [L], the sampled token of each row; -1 in rows after a rejected draft

    def to_host(self) -> Verified:
        """Start to copy the tensors that `to_lists` reads to the host. The values are valid when the step has ended."""
        return Verified(copy_to_host(self.token_ids), copy_to_host(self.num_accepted), self.newest, self.by_row)

    def to_lists(self) -> list[list[int]]:
        """The ids that each sequence yields, after the copy has ended."""
        return [ids[: count + 1] for ids, count in zip(self.token_ids.tolist(), self.num_accepted.tolist(), strict=True)]


def verify(sampled: Tensor, drafts: StepDrafts) -> Verified:
    """Accept drafts while they equal the tokens `sampled` [L] in the rows before them."""
    starts, max_drafts = drafts.starts, drafts.before.shape[1]
    columns = torch.arange(max_drafts + 1, dtype=torch.int32, device=sampled.device)
    index = starts[:-1].unsqueeze(1) + columns
    is_row = index < starts[1:].unsqueeze(1)
    index = index.clamp(max=len(sampled) - 1).long()
    token_ids = sampled[index]
    is_accepted = (token_ids == drafts.after[index]) & (token_ids >= 0) & is_row
    num_accepted = is_accepted.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    token_ids = torch.where(columns <= num_accepted.unsqueeze(1), token_ids, -1)
    newest = token_ids.gather(1, num_accepted.long().unsqueeze(1)).squeeze(1)
    rows = torch.arange(len(sampled), dtype=torch.int32, device=sampled.device)
    is_yielded = rows <= (starts[:-1] + num_accepted).index_select(0, drafts.owners)
    return Verified(token_ids, num_accepted, newest, torch.where(is_yielded, sampled, -1))
