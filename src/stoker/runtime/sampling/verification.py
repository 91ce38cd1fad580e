"""Verification of draft tokens: which of them the sampled tokens confirm, on the device.

A sequence with k drafts has k + 1 rows of logits: after its newest token, and after each draft. A token is sampled in each row, with the
random number of its position, as if the drafts before it were the sequence's tokens. A draft is accepted if it equals the token that was
sampled in the row of its parent, and if the parent is accepted; row 0 is. The sequence yields the accepted drafts and the token sampled
after them, which are exactly the tokens that one step per token yields:

    row       0     1     2     3          drafts    b  c  x
    parent          0     1     2          accepted  b  c
    sampled   b     c     d     ·
    yields    b     c     d

In a tree, several drafts have the same parent, and are different tokens, so that the accepted rows are one path:

    row       0     1     2     3     4    drafts    a  b  c  x
    parent          0     0     2     2    accepted  b  c
    sampled   b     ·     c     d     ·
    yields    b     c     d
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from stoker.base.draft_tree import node_depths
from stoker.kernels import ops


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step with T tokens, S sequences that sample, L rows of logits and at most K drafts per sequence.

    The nodes of a sequence are its rows of logits: node 0 is its newest token, and the others are its drafts.
    """

    token_ids: Tensor  # int32 [T], the tokens of the step; the drafts of a sequence are the last ones
    logits_idx: Tensor  # int32 [L], the token of each row
    starts: Tensor  # int32 [S + 1], the first row of each sequence, and L
    owners: Tensor  # int32 [L], the sequence of each row
    parents: Tensor  # int32 [L], the node of the sequence after which the draft of each row is proposed
    masks: Tensor  # int64 [T], for tokens with logits: bit i is set if node i of the sequence is the token itself or before it
    max_drafts: int  # K

    def before(self) -> Tensor:
        """The drafts up to each row: int32 [L, K]. Column i is draft i of the sequence, or -1 if it is not before the row's next token."""
        first = self.logits_idx.index_select(0, self.starts.index_select(0, self.owners).clamp(max=len(self.logits_idx) - 1))
        nodes = torch.arange(1, self.max_drafts + 1, dtype=torch.int32, device=self.owners.device)
        index = (first.unsqueeze(1) + nodes).clamp(max=len(self.token_ids) - 1)
        is_before = (self.masks[self.logits_idx.long()].unsqueeze(1) >> nodes) & 1 == 1
        return torch.where(is_before, self.token_ids[index.long()].to(torch.int32), -1)


@dataclass(frozen=True, slots=True)
class Verified:
    """What S sequences yield: `token_ids[s, : num_accepted[s] + 1]`."""

    token_ids: Tensor  # int32 [S, K + 1]; -1 after the yielded tokens, and for a token that could not be sampled
    num_accepted: Tensor  # int32 [S], the accepted drafts
    newest: Tensor  # int32 [S], the last yielded token of each sequence
    last: Tensor  # int32 [S], the row in which it was sampled; that of a sequence without rows is undefined
    is_yielded: Tensor  # bool [L], whether the token of each row is yielded
    yielded: Tensor  # int32 [S, K + 2], token_ids and num_accepted side by side, so that one copy moves both to the host


def yielded_ids(yielded: Tensor) -> list[list[int]]:
    """The ids that each sequence yields, from `Verified.yielded` on the host."""
    return [row[: row[-1] + 1] for row in yielded.tolist()]


def verify(sampled: Tensor, drafts: StepDrafts) -> Verified:
    """Accept drafts that equal the tokens `sampled`, int32 [L], in the rows of their parents."""
    tensors = drafts.token_ids, drafts.logits_idx, drafts.starts, drafts.parents, drafts.masks
    token_ids, num_accepted, newest, last, is_yielded = ops.verify(sampled, *tensors, drafts.max_drafts)
    return Verified(token_ids, num_accepted, newest, last, is_yielded, torch.cat((token_ids, num_accepted.unsqueeze(1)), 1))


@lru_cache(maxsize=1024)
def node_masks(parents: Seq[int]) -> np.ndarray:
    """int64 [nodes]: bit j of mask i is set if node j is node i or one of its ancestors. `parents` of the nodes from 1 on: hashable."""
    masks = [1]
    for node, parent in enumerate(parents, 1):
        masks.append(masks[parent] | 1 << node)
    return np.array(masks, dtype=np.uint64).view(np.int64)


@lru_cache(maxsize=1024)
def node_offsets(parents: Seq[int]) -> np.ndarray:
    """int32 [nodes]: the depth of each node less its index, which is 0 in a chain and negative elsewhere."""
    depths = node_depths(parents)
    return np.array(depths, dtype=np.int32) - np.arange(len(depths), dtype=np.int32)


def node_paths(ids: Seq[int], parents: Seq[int]) -> list[tuple[int, ...]]:
    """The drafts from the newest token of a sequence up to each node. `ids` and `parents` of the drafts."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(ids, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths
