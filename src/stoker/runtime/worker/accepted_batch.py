"""The batch of a step after the verification of trees: the accepted tokens of each row come first, in the order of their positions.

A head with a KV cache computes this batch instead of that of the model, so that the keys of accepted drafts are where the next step expects
them. Rejected drafts follow, and the next step overwrites them, as in a chain.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.worker.drafter import DraftInputs


@dataclass(frozen=True, slots=True)
class AcceptedBatch:
    """The batch, and how its tokens are found in that of the model."""

    batch: ForwardBatch
    order: Tensor | None  # int64 [T], the index of each token in the batch of the model; None: the same
    last: Tensor  # int32 [S], the index of the last valid token of each sequence


def accepted_batch(inputs: DraftInputs) -> AcceptedBatch:
    """The batch of a step whose drafts were verified, which without trees is that of the model."""
    batch, verified, starts = inputs.batch, inputs.verified, inputs.starts
    if batch.tree is None or verified is None or starts is None:
        return AcceptedBatch(batch, None, inputs.last_indices)
    assert batch.logits_idx is not None
    num_tokens, num_logits, device = batch.num_tokens, len(verified.is_yielded), batch.positions.device
    logits_idx, query_starts = batch.logits_idx[:num_logits].long(), batch.query_starts.long()
    tokens = torch.arange(num_tokens, device=device)
    row = torch.searchsorted(query_starts, tokens, right=True) - 1  # R for padding
    is_real = torch.arange(num_logits, device=device) < starts[-1]
    rejected = torch.zeros(num_tokens + 1, dtype=torch.int64, device=device)
    rejected.scatter_(0, torch.where(is_real, logits_idx, num_tokens), (~verified.is_yielded).long())
    order = torch.argsort(row * 2 + rejected[:num_tokens], stable=True)
    first_positions = batch.seq_lens.long() - query_starts.diff()
    owner = row.clamp(max=batch.num_rows - 1)
    positions = first_positions[owner] + tokens - query_starts[owner]
    compact = dataclasses.replace(
        batch,
        token_ids=batch.token_ids.index_select(0, order),
        positions=torch.where(row < batch.num_rows, positions, 0).to(batch.positions.dtype),
        tree=None,
        shared={},
    )
    first = batch.logits_idx.index_select(0, starts[:-1].clamp(max=num_logits - 1))
    return AcceptedBatch(compact, order, first + verified.num_accepted)
