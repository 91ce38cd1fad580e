"""Drafts of a head with a KV cache (EAGLE, EAGLE-3, multi-token prediction layers), one token after another.

The cache of the head has the blocks of the model's cache: the head's key at a position is stored in the same slot as the model's, so prefix
reuse, preemption and the release of rejected drafts need no further bookkeeping. After each step of the model:

1. The head computes all tokens of the step. At position t it reads the model's state at t and the token at t + 1. The output at the last
   accepted token gives the first draft.
2. For each further depth of the tree, the head computes the nodes that have children, from its own output and their tokens. Their keys are
   stored after the last valid one, level by level, and a mask limits their attention to their ancestors. In a chain this is one token.
   Positions after the step may have no block yet. Their keys are stored in blocks of the row, and the next step computes them again.

At the end of a prefill chunk, the device does not have the token at t + 1, and the head reads the token at t. The last key of a cached
block belongs to the sequence that computed it first. Both make one key of the head less exact, and never change what is generated.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree
from stoker.core.forward_batch import ForwardBatch, KVCache, TreeMask
from stoker.runtime.heads.draft_levels import make_levels
from stoker.runtime.heads.head import RecurrentHead
from stoker.runtime.heads.sampled_drafts import choose
from stoker.runtime.worker.accepted_batch import AcceptedBatch
from stoker.runtime.worker.draft_batch import SpareBlocks
from stoker.runtime.worker.drafter import DraftInputs


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Where the drafts of S sequences are computed."""

    positions: Tensor  # int32 [S], of the last valid tokens
    tables: Tensor  # int32 [S, B], the block tables, with the spare blocks
    is_real: Tensor  # bool [S], False for padding
    longest: int  # the length of the longest sequence

    def counters(self, depth: int, num_parents: int) -> Tensor:
        """int32 [S × num_parents], the positions of the random numbers of the drafts after each of `num_parents` nodes of a sequence.

        The newest token has position + 1; the first draft, at `depth` 0, has the random number of position + 2.
        """
        found = self.positions + 2 + depth
        return found if num_parents == 1 else found.repeat_interleave(num_parents)


class RecurrentDrafts(ABC):
    """Runs a recurrent head. `caches` have the blocks of the model, and then those of `spare`. `vocab_size` is that of the model."""

    def __init__(self, head: RecurrentHead, caches: list[KVCache], spare: SpareBlocks, vocab_size: int) -> None:
        self.head, self.caches, self.spare, self.vocab_size = head, caches, spare, vocab_size
        self.block_size = caches[0].block_size

    def compute(self, inputs: DraftInputs, accepted: AcceptedBatch, states: Tensor) -> Tensor:
        """Compute the tokens of the step. Returns the outputs [S, hidden] at the last valid token of each sequence.

        `states` [T, hidden], or those of several layers side by side, are the model's states of each token.
        """
        shifted = self._shifted(accepted.batch, inputs.newest, accepted.last, self._is_real(inputs))
        return self.head(self.head.begin(_select(states, 0, accepted.order)), shifted, self.caches).index_select(0, accepted.last)

    @abstractmethod
    def drafts(self, inputs: DraftInputs, x: Tensor, accepted: AcceptedBatch) -> Iterator[Tensor]:
        """The drafts of each sequence from the outputs `x` of `compute`: of a chain one after another, of a tree all at once."""

    def _first_step(self, inputs: DraftInputs, accepted: AcceptedBatch) -> DraftStep:
        """Where the drafts after a step of the model are computed."""
        batch, last = accepted.batch, accepted.last
        positions = batch.positions.index_select(0, last).to(torch.int32)
        return DraftStep(positions, self._tables(batch, inputs.rows, last), self._is_real(inputs), batch.max_seq_len)

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

    def _tables(self, batch: ForwardBatch, rows: Tensor, last: Tensor) -> Tensor:
        """int32 [S, B + spare]: the block tables of the sequences, in which the spare blocks follow the blocks that the step needs."""
        owners = (torch.searchsorted(batch.query_starts, last.contiguous(), right=True) - 1).clamp(max=batch.num_rows - 1)  # padding: R
        used = -(-batch.seq_lens.index_select(0, owners) // self.block_size)[:, None]
        tables, spare = batch.block_tables.index_select(0, owners), self.spare.blocks.index_select(0, rows.long())
        index = torch.arange(tables.shape[1] + spare.shape[1], device=tables.device)[None]
        tables = torch.cat((tables, spare), dim=1)
        beyond = spare.gather(1, (index - used).clamp(0, spare.shape[1] - 1))
        return torch.where(index < used, tables, beyond)

    def _level_batch(
        self, token_ids: Tensor, step: DraftStep, depth: int, count: int, num_before: int, masks: Tensor | None
    ) -> ForwardBatch:
        """The batch of `count` nodes of each sequence at one depth, `token_ids` [S × count]. Padding stores nothing.

        The nodes have consecutive places after the last valid token, level by level, `num_before` in the levels before. `masks` int64
        [S × count] are the nodes, numbered by their places, to which each attends; None: a chain, in which `count` is 1.
        """
        size, device, positions = self.block_size, step.positions.device, step.positions
        ends = positions + 1 + num_before + count
        places = ends.unsqueeze(1) - count + torch.arange(count, dtype=torch.int32, device=device)
        slots = step.tables.gather(1, (places // size).long()) * size + places % size
        return ForwardBatch(
            token_ids=token_ids,
            positions=(positions + depth).repeat_interleave(count),
            slots=torch.where(step.is_real.unsqueeze(1), slots, -1).flatten(),
            query_starts=torch.arange(len(positions) + 1, dtype=torch.int32, device=device) * count,
            seq_lens=torch.where(step.is_real, ends, 0 if masks is None else count),
            block_tables=step.tables,
            num_decodes=len(positions) if masks is None else 0,
            max_query_len=count,
            max_seq_len=step.longest + num_before + count,
            tree=None if masks is None else TreeMask(masks, positions + 1),
        )


class StaticDrafts(RecurrentDrafts):
    """Runs a recurrent head that drafts trees of one shape, or chains."""

    def __init__(self, head: RecurrentHead, caches: list[KVCache], spare: SpareBlocks, vocab_size: int, tree: DraftTree) -> None:
        """As of `RecurrentDrafts`."""
        super().__init__(head, caches, spare, vocab_size)
        self.tree = tree
        self._levels = make_levels(tree, caches[0].keys.device)

    def drafts(self, inputs: DraftInputs, x: Tensor, accepted: AcceptedBatch) -> Iterator[Tensor]:
        step, count, found = self._first_step(inputs, accepted), len(inputs.rows), list[Tensor]()
        for depth, level in enumerate(self._levels.levels):
            if depth:
                before = self._levels.levels[depth - 1]
                x = _select(x.view(count, -1, x.shape[-1]), 1, before.inner_parents).flatten(0, 1)
                token_ids, masks = _select(found[-1], 1, before.inner).flatten(), None if before.is_chain else before.masks.repeat(count)
                x = self.head(x, self._level_batch(token_ids, step, depth, before.num_inner, before.num_before, masks), self.caches)
            counters = step.counters(depth, len(x) // count)
            drafts = choose(self.head.logits(x), self.head.target_ids, inputs, counters, self.vocab_size, level.num_candidates)
            found.append(_select(drafts.view(count, -1), 1, level.chosen))
            if self.tree.is_chain:
                yield found[-1].flatten()
        if not self.tree.is_chain:
            yield _select(torch.cat(found, dim=1), 1, self._levels.order).t()


def _select(x: Tensor, dim: int, index: Tensor | None) -> Tensor:
    """The elements of x at `index` of an axis; None: all."""
    return x if index is None else x.index_select(dim, index)
