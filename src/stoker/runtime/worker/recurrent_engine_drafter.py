"""A draft engine with recurrent states, which drafts chains.

Keys of rejected drafts are overwritten; a recurrent state cannot be. Each row of the device buffers therefore has two slots of states:

    slot r                the state after the last valid token of the row, which the next step continues from
    slot num_rows + 1 + r the state after its newest token and the drafts that follow it, which are only proposed

After each step of the model, the draft engine computes the tokens of the step. Rows that verified drafts store the state after each of
their tokens, and keep the one after the last accepted token, as in the model that verifies (`StateCache.accept`). Then it copies the states
of the rows that sampled to their second slots, and computes the newest token and one draft after another there.

A state is correct only if all tokens before it were computed. `_num_computed` counts, for each row, the tokens whose state is in its slot.
A row whose step starts at another token (its prefix was reused, or the draft engine did not run for a while) computes in the slot of the
padding, and proposes drafts that are never verified, until the missing tokens were computed (`DrafterProgress`). These begin at the first
token of the sequence, or follow those in the slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from stoker.base.draft_tree import DraftTree, DynamicTree
from stoker.core.forward_batch import ForwardBatch, KVCache
from stoker.layers.decoder import Decoder
from stoker.layers.state_cache import StateCache
from stoker.runtime.draft_trees.level_drafts import DraftStep
from stoker.runtime.worker.draft_batch import SpareBlocks, without_logits
from stoker.runtime.worker.drafter import DraftInputs
from stoker.runtime.worker.engine_drafter import EngineDrafter


class RecurrentEngineDrafter(EngineDrafter):
    """Drafts chains with a model that has recurrent states. `states` has two slots for each row of the buffers and for the padding."""

    def __init__(
        self, model: Decoder, caches: list[KVCache], spare: SpareBlocks, chain: DraftTree | DynamicTree, num_ids: int, states: StateCache
    ) -> None:
        super().__init__(model, caches, spare, chain, num_ids)
        self.states, self._num_rows = states, spare.padding_row
        self._num_computed = torch.zeros(self._num_rows + 1, dtype=torch.int32, device=model.device)

    def compute(self, inputs: DraftInputs) -> tuple[DraftStep, Tensor] | None:
        """Where drafts are computed, and the second slots of the sequences, int32 [S, 1]; None if no sequence samples."""
        self._compute_rows(inputs.batch, inputs.last_indices)
        if not len(inputs.rows):
            return None
        batch, last = inputs.batch, inputs.last_indices
        roots = batch.positions.index_select(0, last).to(torch.int32)
        tables = self._spare.sequence_tables(batch, inputs.rows, last)
        step = DraftStep(roots, roots + 2, tables, inputs.rows != self._num_rows, batch.max_seq_len)
        return step, (inputs.rows + (self._num_rows + 1)).unsqueeze(1)

    def drafts(self, inputs: DraftInputs, computed: tuple[DraftStep, Tensor]) -> Iterator[Tensor]:
        step, slots = computed
        self.states.copy(torch.stack((inputs.rows, slots[:, 0]), dim=1))
        batch = self._drafts.level_batch(inputs.newest.clamp(min=0), step, 1, 1, 0, None)
        slots, logits = self.compute_level(slots, batch)
        newest = replace(step, roots=step.roots + 1, longest=step.longest + 1)
        yield from self._drafts.drafts(inputs, newest, slots, logits)

    def compute_level(self, states: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """`states` int32 [S, 1] are the slots, whose states are replaced."""
        batch.state_slots = states[:, 0]
        return states, super().compute_level(states, batch)[1]

    def catch_up(self, batch: ForwardBatch) -> None:
        self._compute_rows(batch, batch.query_starts[1:1])

    def _compute_rows(self, batch: ForwardBatch, last: Tensor) -> None:
        """Compute the tokens of a batch, and keep the state after the last valid one of each row.

        `last` int32 [S] are the indices of the last valid tokens of sequences, first those of the rows with one token or with drafts.
        """
        rows, ends = batch.state_slots, batch.seq_lens
        assert rows is not None
        starts = ends - batch.query_starts.diff()
        follows = (starts == 0) | (starts == self._num_computed.index_select(0, rows))
        slots = torch.where(follows, rows, self._num_rows)
        self._logits(replace(without_logits(batch), state_slots=slots))
        if batch.verified is not None:
            drafted = slice(batch.num_decodes, batch.num_decodes + batch.verified.num_rows)
            self.states.accept(last[drafted], slots[drafted])
            ends = ends.clone()
            ends[drafted] = batch.positions.index_select(0, last[drafted]).to(torch.int32) + 1
        self._num_computed.index_copy_(0, slots.long(), ends)
