"""The passes of a head with a KV cache (EAGLE, EAGLE-3, multi-token prediction layers), which drafts one token after another.

The cache of the head has the blocks of the model's cache: the head's key at a position is stored in the same slot as the model's, so prefix
reuse, preemption and the release of rejected drafts need no further bookkeeping. After each step of the model:

1. The head computes all tokens of the step. At position t it reads the model's state at t and the token at t + 1. The output at the last
   accepted token gives the first draft.
2. For each further depth of the tree, the head computes the nodes that have children, from its own output and their tokens
   (`draft_trees/level_drafts.py`). The root is the last accepted token.

At the end of a prefill chunk, the device does not have the token at t + 1, and the head reads the token at t. The last key of a cached
block belongs to the sequence that computed it first. Both make one key of the head less exact, and never change what is generated.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.runtime.draft_trees.level_drafts import DraftStep, LevelModel
from stoker.runtime.heads.head import RecurrentHead
from stoker.runtime.worker.accepted_batch import AcceptedBatch
from stoker.runtime.worker.draft_batch import SpareBlocks
from stoker.runtime.worker.drafter import DraftInputs


class HeadPasses(LevelModel):
    """Runs a recurrent head. `caches` have the blocks of the model, and then those of `spare`. `num_ids` is the size of its vocabulary."""

    def __init__(self, head: RecurrentHead, caches: list[KVCache], spare: SpareBlocks, num_ids: int) -> None:
        self.head, self.caches, self.spare, self.num_ids = head, caches, spare, num_ids
        self.target_ids, self.block_size = head.target_ids, caches[0].block_size

    def compute(self, inputs: DraftInputs, accepted: AcceptedBatch, states: Tensor) -> Tensor:
        """Compute the tokens of the step. Returns the outputs [S, hidden] at the last valid token of each sequence.

        `states` [T, hidden], or those of several layers side by side, are the model's states of each token.
        """
        shifted = self._shifted(accepted.batch, inputs.newest, accepted.last, self._is_real(inputs))
        states = states if accepted.order is None else states.index_select(0, accepted.order)
        return self.head(self.head.begin(states), shifted, self.caches).index_select(0, accepted.last)

    def compute_level(self, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        states = self.head(states, batch, self.caches)
        return states, self.head.logits(states)

    def draft_step(self, inputs: DraftInputs, accepted: AcceptedBatch) -> DraftStep:
        """Where the drafts after a step of the model are computed. The newest token follows the root, and the first draft follows it."""
        batch, last = accepted.batch, accepted.last
        roots = batch.positions.index_select(0, last).to(torch.int32)
        tables = self.spare.sequence_tables(batch, inputs.rows, last)
        return DraftStep(roots, roots + 2, tables, self._is_real(inputs), batch.max_seq_len)

    def _is_real(self, inputs: DraftInputs) -> Tensor:
        """bool [S]: False for padding."""
        return inputs.rows != self.spare.padding_row

    def _shifted(self, batch: ForwardBatch, newest: Tensor, last: Tensor, is_real: Tensor) -> ForwardBatch:
        """The batch of the step in which each token is replaced by the one after it, as far as the device has it."""
        count, ids = batch.num_tokens, batch.token_ids.to(torch.int32)
        following = torch.cat((ids[1:], ids[-1:], ids[-1:]))  # the last element is for padding
        ends = (batch.query_starts[1:].long() - 1).clamp(min=0)  # the token after the end of a row is that of another row
        following[ends] = ids[ends]
        following[torch.where(is_real, last, count).long()] = newest.clamp(min=0)  # -1: no token could be sampled
        return dataclasses.replace(batch, token_ids=following[:count], logits_idx=None, adapter_ids=None)
