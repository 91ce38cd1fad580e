"""Drafts of a head with a KV cache (EAGLE, EAGLE-3, multi-token prediction layers), one token after another.

The cache of the head has the blocks of the model's cache: the head's key at a position is stored in the same slot as the model's, so prefix
reuse, preemption and the release of rejected drafts need no further bookkeeping. After each step of the model:

1. The head computes all tokens of the step. At position t it reads the model's state at t and the token at t + 1. The output at the last
   accepted token gives the first draft.
2. For each further draft, the head computes one token per sequence, from its own output and the newest draft. Positions after the step
   may have no block yet. Their keys are stored in blocks that belong to the row, and the next step computes them again.

At the end of a prefill chunk, the device does not have the token at t + 1, and the head reads the token at t. The last key of a cached
block belongs to the sequence that computed it first. Both make one key of the head less exact, and never change what is generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.runtime.heads.head import RecurrentHead
from stoker.runtime.heads.sampled_drafts import choose
from stoker.runtime.worker.draft_batch import SpareBlocks
from stoker.runtime.worker.drafter import DraftInputs


class RecurrentDrafts:
    """Runs a recurrent head. `caches` have the blocks of the model, and then those of `spare`. `vocab_size` is that of the model."""

    def __init__(self, head: RecurrentHead, caches: list[KVCache], spare: SpareBlocks, vocab_size: int) -> None:
        self.head, self.caches, self.spare, self.vocab_size = head, caches, spare, vocab_size
        self.block_size = caches[0].block_size

    def compute(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Compute the tokens of the step. Returns the outputs [S, hidden] at the last valid token of each sequence.

        `states` [T, hidden], or those of several layers side by side, are the model's states of each token.
        """
        last = inputs.last_indices
        shifted = self._shifted(inputs, last, self._is_real(inputs))
        return self.head(self.head.begin(states), shifted, self.caches).index_select(0, last)

    def drafts(self, inputs: DraftInputs, x: Tensor, count: int) -> Iterator[Tensor]:
        """At most `count` drafts of each sequence, int32 [S] each, from the outputs `x` of `compute`."""
        batch, last, is_real = inputs.batch, inputs.last_indices, self._is_real(inputs)
        tables, positions = self._tables(inputs, last), batch.positions.index_select(0, last).to(torch.int32)
        ids = inputs.newest
        for i in range(count):
            if i:
                x = self.head(x, self._decode_batch(ids, positions + i, tables, is_real, batch.max_seq_len + i), self.caches)
            # The newest token has position + 1; the first draft has the random number of position + 2.
            ids = self._choose(x, inputs, positions + 2 + i)
            yield ids

    def _is_real(self, inputs: DraftInputs) -> Tensor:
        """bool [S]: False for padding."""
        return inputs.rows != self.spare.padding_row

    def _choose(self, x: Tensor, inputs: DraftInputs, counters: Tensor) -> Tensor:
        """int32 [S]: the drafts from the outputs `x` [S, hidden] of the head."""
        return choose(self.head.logits(x), self.head.target_ids, inputs, counters, self.vocab_size)

    def _shifted(self, inputs: DraftInputs, last: Tensor, is_real: Tensor) -> ForwardBatch:
        """The batch of the step in which each token is replaced by the one after it, as far as the device has it."""
        batch = inputs.batch
        count, ids = batch.num_tokens, batch.token_ids.to(torch.int32)
        following = torch.cat((ids[1:], ids[-1:], ids[-1:]))  # the last element is for padding
        ends = (batch.query_starts[1:].long() - 1).clamp(min=0)  # the token after the end of a row is that of another row
        following[ends] = ids[ends]
        following[torch.where(is_real, last, count).long()] = inputs.newest.clamp(min=0)  # -1: no token could be sampled
        return dataclasses.replace(batch, token_ids=following[:count], logits_idx=None, adapter_ids=None)

    def _tables(self, inputs: DraftInputs, last: Tensor) -> Tensor:
        """int32 [S, B + spare]: the block tables of the sequences, in which the spare blocks follow the blocks that the step needs."""
        batch = inputs.batch
        owners = torch.searchsorted(batch.query_starts, last.contiguous(), right=True) - 1
        used = -(-batch.seq_lens.index_select(0, owners) // self.block_size)[:, None]
        tables, spare = batch.block_tables.index_select(0, owners), self.spare.blocks.index_select(0, inputs.rows.long())
        index = torch.arange(tables.shape[1] + spare.shape[1], device=tables.device)[None]
        tables = torch.cat((tables, spare), dim=1)
        beyond = spare.gather(1, (index - used).clamp(0, spare.shape[1] - 1))
        return torch.where(index < used, tables, beyond)

    def _decode_batch(self, token_ids: Tensor, positions: Tensor, tables: Tensor, is_real: Tensor, longest: int) -> ForwardBatch:
        """The batch of one token per sequence. Padding stores nothing and attends to nothing."""
        size, count = self.block_size, len(token_ids)
        slots = tables.gather(1, (positions // size).long()[:, None])[:, 0] * size + positions % size
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=torch.where(is_real, slots, -1),
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=positions.device),
            seq_lens=torch.where(is_real, positions + 1, 0),
            block_tables=tables,
            num_decodes=count,
            max_query_len=1,
            max_seq_len=longest,
        )
